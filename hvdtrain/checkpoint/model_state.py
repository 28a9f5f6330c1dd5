"""Captures and restores the variables of a model and its optimizer, including those that differ between ranks."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.joined_parts import PARTS, JoinedParts
from hvdtrain.checkpoint.read_ahead import read_ahead
from hvdtrain.checkpoint.table_rows import TableRows, restore_rows
from hvdtrain.checkpoint.transfer import AnyArray, Spec
from hvdtrain.distributed.bounded_messages import groups_of_bounded_size
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compression_memory import MemorySlot
from hvdtrain.distributed.initial_seeds import forget_seed
from hvdtrain.distributed.optimizers import is_accumulator, leaves_of, optimizer_variables
from hvdtrain.distributed.recurrent_states import recurrent_states
from hvdtrain.distributed.replica_consistency import (
    differing,
    note_equal_counters,
    own_random_stream,
    random_streams,
    share_counters,
)
from hvdtrain.distributed.shards import part_of, row_shard_of, whole_shape, whole_variables
from hvdtrain.distributed.snapshot import host_array, host_tensor
from hvdtrain.errors import DataError
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.seams import keras_internals

Averaged: TypeAlias = Callable[[], AbstractContextManager[None]]

# By the number of the optimizer and the name of the variable.
_COMPRESSION = "compression/{}/{}"
_RECURRENT = "recurrent"
# Elements that are averaged at a time.
_PIECE = 4 << 20
_NUMBER = re.compile(r"_\d+(?=[_/.]|$)")


class Assignable(Protocol):
    """What a value of a checkpoint can be assigned to."""

    def assign(self, value: Any) -> Any: ...


class Captured(NamedTuple):
    """The state of a model at one moment. Values share the variables' memory until training changes it."""

    description: dict[str, Any]
    tensors: dict[str, tf.Tensor]
    """On rank 0: what all ranks have in common, or its average over ranks."""
    own: dict[str, AnyArray]
    """What belongs to this rank alone. Rows of tables are those of the moment when they are read."""


class ModelState:
    """Captures and restores the state of a compiled model and its optimizer.

    Replicas have equal weights and optimizers, except in local SGD. Each rank has its own seed generator states, metric
    sums, states of stateful recurrent layers, gradients of the micro-batches since the last update, weights that
    gradients do not update (the moving statistics of BatchNormalization, averaged only for evaluation and in
    checkpoints), and its part of the state of a sharded optimizer, and its rows of sharded tables.
    """

    def __init__(self, model: keras.Model, collectives: Collectives):
        self._model = model
        self._collectives = collectives

    def capture(self, averaged: Averaged | None = None) -> Captured:
        """Captures the current values. Collective: all ranks must call it.

        Args:
            averaged: local SGD: a context in which the model holds the averaged weights. They are captured for
                readers of the checkpoint, in addition to the weights of each rank.
        """
        share_counters(self._model, self._collectives)
        shared = self._shared()
        accumulators = [variable for name, variable in shared.items() if is_accumulator(name)]
        candidates = list(shared.values()) if averaged else [*self._model.non_trainable_weights, *accumulators]
        split = differing(whole_variables(candidates), self._collectives)
        own = {
            "metrics": self._metrics(),
            "random": self._random(),
            _RECURRENT: self._recurrent(),
            "weights": {name: variable for name, variable in shared.items() if id(variable) in split},
            "compression": self._compression(),
            PARTS: {name: variable for name, variable in shared.items() if part_of(variable) is not None},
        }
        values = {name: _own_value(variable) for group in own.values() for name, variable in group.items()}
        is_first, tensors = self._collectives.rank == 0, {}
        with averaged() if averaged else nullcontext():
            if is_first:
                tensors = {name: host_tensor(each) for name, each in shared.items() if part_of(each) is None}
        for name, variable in own["weights"].items():
            if keras.backend.is_float_dtype(variable.dtype) and not (averaged and name.startswith("model/")):
                mean = self._mean(host_array(variable), keep=is_first)
                if is_first:
                    tensors[name] = tf.constant(mean, variable.dtype)
        description = {
            "variables": _whole_description(shared),
            "own": {group: _description(variables) for group, variables in own.items()},
            "accumulate": self._accumulate,
            "ranks": self._collectives.size,
        }
        return Captured(description, tensors, values)

    def _mean(self, value: np.ndarray, *, keep: bool) -> np.ndarray:
        """The mean over ranks, reduced in pieces of bounded size; only part of it unless ``keep``."""
        flat = value.reshape(-1)
        wide = np.float64 if value.dtype == np.float64 else np.float32
        mean = np.empty(flat.shape if keep else 0, wide)
        for begin in range(0, len(flat), _PIECE):
            (total,) = self._collectives.sum([flat[begin : begin + _PIECE].astype(wide)])
            if keep:
                mean[begin : begin + _PIECE] = total / self._collectives.size
        return mean.reshape(value.shape) if keep else mean

    def require_well_formed(
        self, description: Mapping[str, Any], tensors: Mapping[str, Any], specs: Sequence[Sequence[Spec]]
    ) -> None:
        """Raises LookupError, TypeError or ValueError unless a description is as :meth:`capture` returned it.

        Args:
            tensors: the shared tensors.
            specs: those of the arrays of each rank.
        """
        own = [each for group in description["own"].values() for each in group]
        if int(description["accumulate"]) < 1:
            raise ValueError(f"accumulate is {description['accumulate']}")
        for name, shape, dtype in [*description["variables"], *own]:
            if not (isinstance(name, str) and isinstance(dtype, str) and all(isinstance(each, int) for each in shape)):
                raise TypeError(f"a variable must be a name, a shape and a dtype, not {[name, shape, dtype]!r:.200}")
        if missing := [each[0] for each in description["variables"] if each[0] not in tensors]:
            raise LookupError(f"there is no tensor {missing[0]!r}")
        for rank, arrays in enumerate(specs):
            found = {name: (shape, dtype) for name, shape, dtype in arrays}
            if missing := [name for name, shape, dtype in own if found.get(name) != (shape, dtype)]:
                raise LookupError(f"rank {rank} has no array {missing[0]!r}")

    def require_same_variables(self, description: Mapping[str, Any]) -> None:
        """Raises DataError if the variables of a checkpoint are not those of the model and its optimizer."""
        here = [*_whole_description(self._shared()), *_description(self._random())]
        there = [*description["variables"], *description["own"]["random"]]
        # Gradient accumulators depend on gradient_accumulation_steps.
        here, there = ([each for each in group if not is_accumulator(each[0])] for group in (here, there))
        for saved, own in itertools.zip_longest(there, here):
            if (
                saved is None
                or own is None
                or [_without_numbers(saved[0]), *saved[1:]] != [_without_numbers(own[0]), *own[1:]]
            ):
                raise DataError(
                    "a checkpoint must be of the same model and optimizer. Received: "
                    f"{_text(saved)} in the checkpoint, {_text(own)} here"
                )

    def restore_shared(
        self, description: Mapping[str, Any], tensors: JoinedParts | None, *, without: Iterable[keras.Variable]
    ) -> None:
        """Restores what all ranks have in common. Collective: all ranks must call it.

        Args:
            tensors: on rank 0; None on the others.
            without: variables that the caller restores on each rank.
        """
        others = {id(variable) for variable in without}
        same_accumulation = description["accumulate"] == self._accumulate
        by_name = self._by_saved_name(description, accumulators=same_accumulation)
        restored = {name: variable for name, variable in by_name.items() if id(variable) not in others}
        names = {id(variable): name for name, variable in restored.items()}

        def read(variables: Sequence[keras.Variable]) -> None:
            for variable in variables:
                if tensors is not None and id(variable) in names:
                    variable.assign(tensors.tensor(names[id(variable)]))

        shared = whole_variables([each for each in self._shared().values() if id(each) not in others])
        with closing(read_ahead(_groups(shared), read)) as groups:
            for group in groups:
                self._collectives.broadcast([variable.value for variable in group])
        for name, variable in restored.items():
            if (shard := row_shard_of(variable)) is not None:
                restore_rows(variable, shard, name, tensors or {}, self._collectives)
            elif (part := part_of(variable)) is not None:
                # One after the other, so that only one of them is in memory as a whole.
                value = np.zeros(part.shape, variable.dtype) if tensors is None else tensors[name]
                whole = tf.Variable(value, trainable=False, dtype=variable.dtype)
                self._collectives.broadcast([whole])
                variable.assign(part.of(whole))
        if not same_accumulation:
            self._restart_accumulation(description["accumulate"])
        for variable in self._model.weights:
            forget_seed(variable)
        note_equal_counters(self._model)

    def _restart_accumulation(self, saved_accumulate: int) -> None:
        """Empties the accumulators, and counts what Keras does: accumulation steps."""
        for variable in [each for name, each in self._shared().items() if is_accumulator(name)]:
            variable.assign(tf.zeros_like(variable.value))
        for leaf in leaves_of(self._model):
            iterations = keras_internals.ITERATIONS.of(leaf)
            iterations.assign(int(iterations.numpy()) // saved_accumulate * self._accumulate)

    def _by_saved_name(self, description: Mapping[str, Any], *, accumulators: bool) -> dict[str, keras.Variable]:
        """The variables of the model and its optimizer, by their names in a checkpoint."""
        saved = [name for name, _, _ in description["variables"] if accumulators or not is_accumulator(name)]
        here = [each for name, each in self._shared().items() if accumulators or not is_accumulator(name)]
        return dict(zip(saved, here, strict=True))

    def own_variables(self, description: Mapping[str, Any]) -> dict[str, Assignable]:
        """Returns the variables that hold per-rank values, by their names in the checkpoint."""
        return {**self._own_variables(description), **self._kept_by_compression(description)}

    def _own_variables(self, description: Mapping[str, Any]) -> dict[str, keras.Variable]:
        by_name = self._by_saved_name(description, accumulators=description["accumulate"] == self._accumulate)
        own = description["own"]
        found = {each[0]: by_name[each[0]] for each in own["weights"] if each[0] in by_name}
        for name, shape, _ in own.get(PARTS, []):
            if name in by_name and part_of(by_name[name]) is not None and list(by_name[name].shape) == shape:
                found[name] = by_name[name]
        found |= dict(zip((each[0] for each in own["random"]), self._random().values(), strict=True))
        metrics = self._metrics()
        if [each[1:] for each in own["metrics"]] == [each[1:] for each in _description(metrics)]:
            found |= dict(zip((each[0] for each in own["metrics"]), metrics.values(), strict=True))
        saved, states = own.get(_RECURRENT, []), self._recurrent()
        if [each[1:] for each in saved] == [each[1:] for each in _description(states)]:
            found |= dict(zip((each[0] for each in saved), states.values(), strict=True))
        return found

    def restore_on_other_ranks(
        self, description: Mapping[str, Any], read: Callable[[int, str], np.ndarray] | None
    ) -> None:
        """Restores on a different number of ranks: sums of metrics on rank 0, new random streams, averaged weights.

        Collective: all ranks must call it.

        Args:
            read: returns an array of a rank; used on rank 0 only.
        """
        variables, own = self._own_variables(description), description["own"]
        metrics = [each[0] for each in own["metrics"] if each[0] in variables]
        for name in metrics:
            variables[name].assign(tf.zeros_like(variables[name].value))
            if read is not None:
                variables[name].assign(sum(read(rank, name) for rank in range(description["ranks"])))
        streams = {each[0]: None if read is None else read(0, each[0]) for each in own["random"]}
        for name, state in self._collectives.allgather(streams)[0].items():
            variables[name].assign(own_random_stream(state, self._collectives.rank))
        for state in self._recurrent().values():  # Other samples follow on this rank.
            state.assign(tf.zeros_like(state.value))
        self._restore_compression(description, read)

    def _restore_compression(
        self, description: Mapping[str, Any], read: Callable[[int, str], np.ndarray] | None
    ) -> None:
        """Divides the errors of all ranks equally among the current ranks, so that nothing is lost."""
        slots = self._kept_by_compression(description)
        before, now = description["ranks"], self._collectives.size
        for name, shape, dtype in description["own"].get("compression", []):
            if name not in slots:
                continue
            received = tf.Variable(tf.zeros(shape, dtype), trainable=False)
            if read is not None:
                received.assign(slots[name].of_other_ranks([read(rank, name) for rank in range(before)], now))
            self._collectives.broadcast([received])
            slots[name].assign(received.numpy())

    def _compression(self) -> dict[str, keras.Variable]:
        memories = enumerate(compression_memories(self._model))
        return {_COMPRESSION.format(i, name): v for i, memory in memories for name, v in memory.variables().items()}

    def _kept_by_compression(self, description: Mapping[str, Any]) -> dict[str, MemorySlot]:
        """The destinations of a checkpoint's values, if there is a compression."""
        saved = [each[0] for each in description["own"].get("compression", [])]
        memories = enumerate(compression_memories(self._model))
        slots = {
            name: memory.slot(name.removeprefix(start))
            for i, memory in memories
            for name in saved
            if name.startswith(start := _COMPRESSION.format(i, ""))
        }
        return slots

    @property
    def _accumulate(self) -> int:
        return leaves_of(self._model)[0].gradient_accumulation_steps or 1

    def _shared(self) -> dict[str, keras.Variable]:
        return {**_named("model", self._model.weights), **_named("optimizer", optimizer_variables(self._model))}

    def _metrics(self) -> dict[str, keras.Variable]:
        return _named("metrics", self._model.metrics_variables)

    def _recurrent(self) -> dict[str, keras.Variable]:
        """The states that stateful layers keep between batches, which are no weights."""
        return _named(_RECURRENT, recurrent_states(self._model))

    def _random(self) -> dict[str, keras.Variable]:
        return _named("random", random_streams(self._model))


def _named(group: str, variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """Returns variables by path, with a number if paths are equal."""
    result: dict[str, keras.Variable] = {}
    for variable in variables:
        name, number = f"{group}/{variable.path}", 1
        while name in result:
            number += 1
            name = f"{group}/{variable.path}.{number}"
        result[name] = variable
    return result


def _groups(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Variables that are read while those before them are sent."""
    values = [variable.value for variable in variables]
    return [[variables[i] for i in group] for group in groups_of_bounded_size(values)]


def _own_value(variable: keras.Variable) -> AnyArray:
    return host_array(variable) if row_shard_of(variable) is None else TableRows(variable)


def _description(variables: Mapping[str, keras.Variable]) -> list[list[Any]]:
    return [[name, list(variable.shape), variable.dtype] for name, variable in variables.items()]


def _whole_description(variables: Mapping[str, keras.Variable]) -> list[list[Any]]:
    """Describes variables of which a rank may hold a part; the description is the same without sharding."""
    return [[name, list(whole_shape(variable)), variable.dtype] for name, variable in variables.items()]


def _without_numbers(name: str) -> str:
    return _NUMBER.sub("", name)


def _text(variable: Sequence[Any] | None) -> str:
    return "nothing" if variable is None else f"{variable[0]} {tuple(variable[1])} {variable[2]}"
