"""Whether ranks shard the same data in the same order: otherwise some samples are seen twice, and others never."""

import functools
import hashlib
import os.path
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data import generated_order, kept_order
from hvdtrain.data.random_functions import draws_without_seed
from hvdtrain.distributed import runtime
from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.errors import UsageError
from hvdtrain.optim.values_of_parts import is_part, note_parts
from hvdtrain.seams import tensorflow_internals
from hvdtrain.system import cores

_NUM_COMPARED = 16
"""Samples of an array or of a ``PyDataset`` by which its order is recognized."""

Order = list[str]
"""Digests of data in its order; an empty one says nothing."""

_orders: list[Order] = []
_in_first_epoch: WeakKeyDictionary[keras.utils.PyDataset, Order] = WeakKeyDictionary()


def note(data: Any) -> None:
    """Notes the order of data that is about to be sharded.

    Raises:
        UsageError: it is shuffled without a seed, or a part of the data already.
    """
    _require_whole(data)
    order = []
    for each in tf.nest.flatten(data):
        if isinstance(each, tf.data.Dataset):
            order += _order_of_dataset(each, _refuse_to_shuffle_without_seed)
        elif isinstance(each, keras.utils.PyDataset):
            order += _repeated(functools.partial(_first_samples, each))
            # Without a digest, what is noted later would be compared with something else.
            if order and not runtime.collectives().may_change:
                _in_first_epoch[each] = order
        elif hasattr(each, "__getitem__") and len(getattr(each, "shape", [])):
            order.append(_some_rows(each))
        elif hasattr(each, "__getitem__") and hasattr(each, "__len__") and not isinstance(each, str | bytes):
            order += _repeated(functools.partial(_some_samples, each))
    _orders.append(order)


def _require_whole(data: Any) -> None:
    if is_part(data):
        raise UsageError(
            "data must be sharded once. Received: this rank's part of data that is sharded already, of which it would "
            "take a part: the other samples would never be seen. Leave out hvdtrain.shard, or tf.data.Dataset.shard."
        )


def _refuse_to_shuffle_without_seed() -> str:
    raise UsageError(
        "data must be in the same order on all ranks when it is sharded. Received: a data set that is shuffled, "
        "or filtered at random, without a seed. Call hvdtrain.init(seed=…) first, pass a seed, or shuffle what "
        "hvdtrain.shard returns."
    )


def note_end_of_epoch(dataset: keras.utils.PyDataset) -> None:
    """Notes the order of a ``PyDataset`` after its first epoch, in which many are shuffled anew."""
    order = _in_first_epoch.pop(dataset, None)
    if order is not None:
        order += _repeated(functools.partial(_first_samples, dataset))


def noted() -> list[Order]:
    """The orders of the data that this rank has sharded, for comparison with other ranks."""
    return [list(each) for each in _orders]


def differ(everyone: Sequence[Sequence[Order]]) -> bool:
    """Whether ranks have sharded the same data in different orders.

    Args:
        everyone: what each rank has noted. Ranks that have noted other numbers of data sets shard different data.
    """
    if len({len(orders) for orders in everyone}) > 1:
        return False
    return any(
        len({each for each in digests if each}) > 1
        for orders in zip(*everyone, strict=True)
        for digests in zip(*orders, strict=False)
    )


shard_without_note = tf.data.Dataset.shard
"""TensorFlow's own, for data whose order is noted already."""


@functools.wraps(shard_without_note)
def _note_and_shard(self: tf.data.Dataset, num_shards: Any, index: Any, name: str | None = None) -> tf.data.Dataset:
    """``tf.data.Dataset.shard``, by which programs shard data themselves."""
    collectives = runtime.collectives()
    # Within a graph, such as that of interleave, arrays and seeds have no values.
    if collectives.size > 1 and tf.executing_eagerly() and (num_shards, index) == (collectives.size, collectives.rank):
        _require_whole(self)
        # Shuffled without a seed, a data set has an order that no other rank has.
        order = _order_of_dataset(self, of_unseeded_shuffle=lambda: uuid.uuid4().hex)
        self = kept_order.in_order(self)
        kept_order.note_shard(self)
        _orders.append(order)
        part = shard_without_note(self, num_shards, index, name)
        note_parts(part)
        return part
    return shard_without_note(self, num_shards, index, name)


tf.data.Dataset.shard = _note_and_shard


def _order_of_dataset(dataset: tf.data.Dataset, of_unseeded_shuffle: Callable[[], str]) -> Order:
    """The arrays that a data set is made of, the seeds of its shuffles, and how many data sets it interleaves."""
    generated_order.note(dataset)
    order = []
    for each in with_inputs(dataset):
        arrays = vars(each).get(tensorflow_internals.DATASET_ARRAYS, [])
        order += [_some_rows(array) for array in arrays if array.dtype != tf.variant and array.shape.rank]
        seeds = [vars(each).get(name) for name in tensorflow_internals.SHUFFLE_SEEDS]
        if None not in seeds:
            numbers = [int(seed) for seed in seeds]
            order.append(of_unseeded_shuffle() if numbers == [0, 0] else str(numbers))
        if draws_without_seed(each):
            order.append(of_unseeded_shuffle())
        if vars(each).get(tensorflow_internals.CYCLE_LENGTH, 1) == tf.data.AUTOTUNE:
            order.append(f"{_default_cycle_length(each)} at once")
    return order


def _default_cycle_length(interleaved: tf.data.Dataset) -> int:
    """How many data sets are interleaved at once, unless a program says it."""
    (several,) = tensorflow_internals.DATASET_INPUTS.of(interleaved)()
    length = int(several.cardinality())
    return cores.usable_cores() if length < 0 else min(length, cores.usable_cores())


def _repeated(read: Callable[[], list[str]]) -> list[str]:
    """A digest of each part of samples; empty if it is not the same when they are read again."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        both = zip(read(), read(), strict=True)
        return [one if one == other else "" for one, other in both]
    except Exception:
        return []  # Training reads them again, and says what is wrong.
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _first_samples(dataset: keras.utils.PyDataset) -> list[str]:
    batches: list[list[np.ndarray]] = []
    while len(batches) != dataset.num_batches and sum(len(parts[0]) for parts in batches) < _NUM_COMPARED:
        batches.append(_parts(dataset[len(batches)]))
    return [" ".join(_some_rows(each) for each in part) for part in zip(*batches, strict=True)]


def _some_samples(samples: Any) -> list[str]:
    """A digest of each part of a few samples that are objects, as those of Grain."""
    chosen = [_parts(samples[number]) for number in _some_numbers(len(samples))]
    return [_digest(part) for part in zip(*chosen, strict=True)]


def _parts(sample: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in tf.nest.flatten(sample) if each is not None]


def _some_rows(array: Any) -> str:
    """A digest of a few rows."""
    rows = getattr(array, "iloc", array)
    return _digest([np.asarray(rows[number]) for number in _some_numbers(array.shape[0])])


def _some_numbers(length: int) -> list[int]:
    numbers: list[int] = np.linspace(0, length - 1, min(length, _NUM_COMPARED)).astype(int).tolist()
    return numbers


def _digest(rows: Sequence[np.ndarray]) -> str:
    """A digest; of texts without their common prefix, because hosts may keep files in other folders."""
    texts = [row.item() for row in rows if row.ndim == 0 and isinstance(row.item(), str | bytes)]
    # Texts need not be paths.
    begin = len(os.path.commonprefix(texts)) if len(texts) == len(rows) else 0  # noqa: RUF071
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row.item()[begin:] if begin else row).encode())
    return digest.hexdigest()
