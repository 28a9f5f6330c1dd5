"""What the generators of ``tf.data.Dataset.from_generator`` yield first, to find those that shuffle without a seed."""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.distributed.replica_consistency import sha256_of

_NUM_COMPARED = 16

_yielded: "WeakKeyDictionary[tf.data.Dataset, list[str]]" = WeakKeyDictionary()
_of_sharded: list[list[str]] = []
_from_generator_here = tf.data.Dataset.from_generator


def note(dataset: tf.data.Dataset) -> None:
    """Notes that a data set is sharded: its generators must yield the same on all ranks."""
    _of_sharded.extend(_yielded[each] for each in with_inputs(dataset) if each in _yielded)


def noted() -> list[list[str]]:
    """Digests of what each generator has yielded first, of as many elements as have been read."""
    return [list(each) for each in _of_sharded]


def differ(everyone: Sequence[Sequence[Sequence[str]]]) -> bool:
    """Whether the generators of ranks yield something else.

    Args:
        everyone: what each rank has noted. Ranks that have noted other numbers of generators shard different data.
    """
    if len({len(generators) for generators in everyone}) > 1:
        return False
    return any(
        len(set(elements)) > 1
        for generators in zip(*everyone, strict=True)
        for elements in zip(*generators, strict=False)
    )


@functools.wraps(_from_generator_here)
def _from_noted_generator(generator: Callable[..., Any], *arguments: Any, **named: Any) -> tf.data.Dataset:
    if not callable(generator):
        return _from_generator_here(generator, *arguments, **named)
    yielded: list[str] = []
    dataset = _from_generator_here(_noting(generator, yielded), *arguments, **named)
    _yielded[dataset] = yielded
    return dataset


tf.data.Dataset.from_generator = staticmethod(_from_noted_generator)


def _noting(generator: Callable[..., Any], yielded: list[str]) -> Callable[..., Iterator[Any]]:
    """The generator, the first elements of whose first pass are noted."""

    @functools.wraps(generator, updated=())
    def generate(*arguments: Any) -> Iterator[Any]:
        elements = iter(generator(*arguments))
        if not yielded:
            for element in islice(elements, _NUM_COMPARED):
                yielded.append(_digest(element))
                yield element
        yield from elements

    return generate


def _digest(element: Any) -> str:
    """A digest of an element's smallest part, such as its label: augmentation changes others."""
    parts = [np.asarray(each) for each in tf.nest.flatten(element)]
    smallest = min(parts, key=lambda part: part.size, default=np.empty(0))
    return sha256_of([smallest if smallest.dtype != object else np.array(repr(smallest.tolist()))])
