"""The variables of a compiled model that training changes, and what of them is each rank's own."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import Collectives
from hvdtrain.errors import DataError
from hvdtrain.optimizer import leaves
from hvdtrain.replicas import differing, own_random_stream, random_streams

Averaged: TypeAlias = Callable[[], AbstractContextManager[None]]

_NUMBER = re.compile(r"_\d+(?=[_/.]|$)")


class ModelState:
    """Reads and writes the state of a model and its optimizer.

    Replicas have equal weights and optimizers, unless ranks train alone. A rank's own are the states of its
    seed generators, the sums of its metrics, and weights that are updated outside of the gradients
    (BatchNorm's moving statistics), which are averaged only when somebody looks at them.
    """

    def __init__(self, model: keras.Model, collectives: Collectives):
        self._model = model
        self._collectives = collectives

    def capture(self, averaged: Averaged | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A description, and tensors by name. Every rank has to call it.

        Args:
            averaged: in which the model is that of all ranks, where they train alone: its weights are kept for
                whoever reads them, and each rank's own besides.

        The tensors share the variables' memory until training changes those, so that capturing copies nothing.
        """
        shared = self._shared()
        candidates = list(shared.values()) if averaged else self._model.non_trainable_weights
        split = differing(candidates, self._collectives)
        own = {
            "metrics": self._metrics(),
            "random": self._random(),
            "weights": {name: variable for name, variable in shared.items() if id(variable) in split},
        }
        values = {name: variable.numpy() for group in own.values() for name, variable in group.items()}
        by_rank = self._collectives.allgather(values)
        with averaged() if averaged else nullcontext():
            tensors = {name: _on_host(variable) for name, variable in shared.items()}
        for name, variable in own["weights"].items():
            if keras.backend.is_float_dtype(variable.dtype) and not (averaged and name.startswith("model/")):
                tensors[name] = tf.constant(sum(each[name] for each in by_rank) / self._collectives.size)
        for rank, each in enumerate(by_rank):
            tensors |= {f"rank{rank}/{name}": value for name, value in each.items()}
        description = {
            "variables": _description(shared),
            "own": {group: _description(variables) for group, variables in own.items()},
            "accumulate": self._accumulate,
            "ranks": self._collectives.size,
        }
        return description, tensors

    def require_same_variables(self, description: Mapping[str, Any]) -> None:
        """Raises DataError where a checkpoint holds other variables than the model and its optimizer have."""
        here = [*_description(self._shared()), *_description(self._random())]
        there = [*description["variables"], *description["own"]["random"]]
        # With another number of micro-batches a step there are other accumulators, which are zero between steps.
        here, there = ([each for each in group if not _is_accumulator(each[0])] for group in (here, there))
        for saved, own in itertools.zip_longest(there, here):
            if saved is None or own is None or [_plain(saved[0]), *saved[1:]] != [_plain(own[0]), *own[1:]]:
                raise DataError(
                    "a checkpoint must be of the same model and optimizer. Received: "
                    f"{_text(saved)} in the checkpoint, {_text(own)} here"
                )

    def restore(
        self, description: Mapping[str, Any] | None, tensors: Mapping[str, np.ndarray], *, with_own: bool = True
    ) -> None:
        """Puts back what rank 0 has read. Every rank has to call it.

        Args:
            description: on rank 0; on the others of no account, as ``tensors``.
            with_own: also what was each rank's own.
        """
        collectives = self._collectives
        by_rank = None
        if collectives.rank == 0:
            assert description is not None
            self._restore_shared(description, tensors)
            by_rank = self._own_by_rank(description, tensors) if with_own else None
        collectives.broadcast([variable.value for variable in self._shared().values()])
        if not with_own:
            return
        by_rank = collectives.allgather(by_rank)[0]
        if len(by_rank) == collectives.size:
            here = {**self._shared(), **self._metrics(), **self._random()}
            for name, value in by_rank[collectives.rank].items():
                here[name].assign(value)
        else:
            self._take_over(by_rank)

    def _restore_shared(self, description: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        saved = [each[0] for each in description["variables"]]
        here = self._shared()
        if description["accumulate"] != self._accumulate:
            saved = [name for name in saved if not _is_accumulator(name)]
            for name in [name for name in here if _is_accumulator(name)]:
                variable = here.pop(name)
                variable.assign(tf.zeros_like(variable.value))
        for name, variable in zip(saved, here.values(), strict=True):
            variable.assign(tensors[name])
        if description["accumulate"] != self._accumulate:
            for leaf in leaves(self._model.optimizer):  # Keras counts micro-batches
                leaf._iterations.assign(int(leaf._iterations.numpy()) // description["accumulate"] * self._accumulate)

    def _own_by_rank(
        self, description: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
    ) -> list[dict[str, np.ndarray]]:
        """What each rank of the checkpoint had of its own, by the names of this process."""
        saved_weights = [each[0] for each in description["variables"] if not _is_accumulator(each[0])]
        weights = [name for name in self._shared() if not _is_accumulator(name)]
        names = dict(zip(saved_weights, weights, strict=True))
        names = {each[0]: names[each[0]] for each in description["own"]["weights"]}
        names |= dict(zip((each[0] for each in description["own"]["random"]), self._random(), strict=True))
        metrics = self._metrics()
        if [each[1:] for each in description["own"]["metrics"]] == [each[1:] for each in _description(metrics)]:
            names |= dict(zip((each[0] for each in description["own"]["metrics"]), metrics, strict=True))
        ranks = range(description["ranks"])
        return [{name: tensors[f"rank{rank}/{saved}"] for saved, name in names.items()} for rank in ranks]

    def _take_over(self, by_rank: Sequence[Mapping[str, np.ndarray]]) -> None:
        """On another number of ranks: weights stay averaged, metrics' sums go to rank 0, random streams part anew."""
        rank = self._collectives.rank
        for name, variable in self._metrics().items():
            total = sum(values[name] for values in by_rank if name in values)
            variable.assign(total if rank == 0 else tf.zeros_like(variable.value))
        for name, variable in self._random().items():
            variable.assign(own_random_stream(by_rank[0][name], rank))

    @property
    def _accumulate(self) -> int:
        return leaves(self._model.optimizer)[0].gradient_accumulation_steps or 1

    def _shared(self) -> dict[str, keras.Variable]:
        return {**_named("model", self._model.weights), **_named("optimizer", self._model.optimizer.variables)}

    def _metrics(self) -> dict[str, keras.Variable]:
        return _named("metrics", self._model.metrics_variables)

    def _random(self) -> dict[str, keras.Variable]:
        return _named("random", random_streams(self._model))


def _is_accumulator(name: str) -> bool:
    return "gradient_accumulator" in name


def _on_host(variable: keras.Variable) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.identity(variable.value)


def _named(group: str, variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """By path, numbered where two have the same."""
    result: dict[str, keras.Variable] = {}
    for variable in variables:
        name, number = f"{group}/{variable.path}", 1
        while name in result:
            number += 1
            name = f"{group}/{variable.path}.{number}"
        result[name] = variable
    return result


def _description(variables: Mapping[str, keras.Variable]) -> list[list[Any]]:
    return [[name, list(variable.shape), variable.dtype] for name, variable in variables.items()]


def _plain(name: str) -> str:
    return _NUMBER.sub("", name)


def _text(variable: Sequence[Any] | None) -> str:
    return "nothing" if variable is None else f"{variable[0]} {tuple(variable[1])} {variable[2]}"
