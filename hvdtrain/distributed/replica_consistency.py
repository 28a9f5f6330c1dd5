"""Consistent replicas: broadcast before training, shared statistics and comparisons during it."""

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.adapted_layers import require_equal_adapted_layers, share_adapted_layers
from hvdtrain.distributed.agreement import ranks_text, require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.distinct_values import gather_distinct, most_common
from hvdtrain.distributed.initial_seeds import share_seeds
from hvdtrain.distributed.model_roles import note_replicated
from hvdtrain.distributed.optimizers import build_optimizer, optimizer_variables, require_keras_model
from hvdtrain.distributed.row_shards import blocks_on_first_rank
from hvdtrain.distributed.shards import has_tables, row_shard_of, whole_variables
from hvdtrain.distributed.snapshot import host_array, path_of, resource_of
from hvdtrain.errors import DivergenceError, UsageError
from hvdtrain.seams import keras_internals
from hvdtrain.system import network
from hvdtrain.system.terminal import report

# Far larger than the number of draws of any run, so that the streams of two ranks do not overlap.
_SEED_STRIDE = 0x9E3779B9
_FIRST = "only_first_replica"  # as Keras names rank 0's
_NUMBER = re.compile(r"_\d+(?=/|$)")


def broadcast(
    model: keras.Model | tf.Module | Sequence[keras.Variable | tf.Variable], *, collectives: Collectives | None = None
) -> None:
    """Copies rank 0's variables of the model and its optimizer to all ranks; call it before the first step.

    Also those of a ``tf.Module``, and the variables in a list, such as ``optimizer.variables`` if the model is not
    compiled.

    Builds the optimizer. Layers with ``adapt`` (Normalization, StringLookup, …) get rank 0's state, lookup tables
    included. Each rank has its own random streams, derived from rank 0's: those of the model's seed generators
    (all layers that Keras ships draw from one), and Keras' global one, from which ``keras.random`` draws without a
    seed. Python's, NumPy's and ``tf.random``'s streams stay the same on all ranks.

    Raises:
        DisagreementError: on every rank: variables have different shapes or dtypes.
        DivergenceError: on every rank: vocabularies have different sizes, on which the model's shapes depend.
        UsageError: the model is not built.
    """
    collectives = collectives or runtime.current().collectives
    if not isinstance(model, keras.Model) and isinstance(model, tf.Module):
        model = model.variables
    if isinstance(model, list | tuple) and all(isinstance(each, keras.Variable | tf.Variable) for each in model):
        _require_same_shapes(model, lambda: _structure("", model), "variables", collectives)
        collectives.broadcast([resource_of(variable) for variable in whole_variables(model)])
        share_seeds(model, collectives)
        return
    require_keras_model(model)
    if not is_built(model):
        raise UsageError(
            f"model {model.name!r} must be built before its variables are broadcast: give its first layer an Input, or "
            "call the model once on a batch."
        )
    build_optimizer(model)
    _report_foreign_variables(model, collectives)
    share_adapted_layers(model, collectives)
    own = [*model.variables, *optimizer_variables(model)]
    _require_same_shapes(own, lambda: structure(model), "model", collectives)
    # On one rank nothing changes: Keras makes its global generator with the first draw.
    global_streams = [global_stream()] if collectives.size > 1 else []
    variables = [*whole_variables(own), *global_streams]
    collectives.broadcast([variable.value for variable in variables])
    share_seeds(model.weights, collectives)
    note_equal_counters(model)
    note_replicated(model)
    for variable in [*random_streams(model), *global_streams]:
        variable.assign(own_random_stream(variable.numpy(), collectives.rank))


def _require_same_shapes(
    variables: Sequence[keras.Variable | tf.Variable],
    structure: Callable[[], dict[str, str]],
    what: str,
    collectives: Collectives,
) -> None:
    everyone = gather_distinct([_shape(each) for each in whole_variables(variables)], collectives)
    # Names may differ, and only help to find what has another shape.
    if any(each != everyone[0] for each in everyone):
        require_agreement(
            what, structure(), collectives, remedy=f"Build the {what} from what all ranks have in common."
        )


def _report_foreign_variables(model: keras.Model, collectives: Collectives) -> None:
    """Says on rank 0 which variables of layers are no weights: Keras does not know of them."""
    if collectives.size == 1 or collectives.rank > 0:
        return
    for layer in keras_internals.FLATTEN_LAYERS.of(model)():
        for name, value in vars(layer).items():
            if isinstance(value, tf.Variable):
                report(
                    0,
                    f"layer {layer.name!r} keeps a tf.Variable as {name!r}, which is no weight of the model: it is "
                    "neither broadcast, nor compared between ranks, nor saved. Create it by add_weight.",
                )


def is_built(model: keras.Model) -> bool:
    """Whether all variables of the model exist; one with its own ``train_step`` may never be called itself."""
    parts = keras_internals.FLATTEN_LAYERS.of(model)(include_self=False)
    parts_are_built = all(layer.built for layer in parts)
    # build() of a model that Keras cannot build by itself leaves it without weights.
    return model.built or parts_are_built if model.weights else model.built and parts_are_built


def random_streams(model: keras.Model) -> list[keras.Variable]:
    """The states of the model's seed generators, such as those of dropout."""
    # Keras: a model's variables are weights, metrics and the states of seed generators.
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [variable for variable in model.variables if id(variable) not in others]


def global_stream() -> keras.Variable:
    """The state of Keras' global seed generator, which is made if there is none."""
    # Making it takes its seed from Python's generator, from which layers may draw too.
    python_state = random.getstate()
    state: keras.Variable = keras_internals.GLOBAL_GENERATOR.value()().state
    random.setstate(python_state)
    return state


def own_random_stream(state: np.ndarray, rank: int) -> np.ndarray:
    """A rank's state of a seed generator, derived from rank 0's."""
    state = state.copy()
    state[0] = (int(state[0]) + rank * _SEED_STRIDE) % (int(np.iinfo(state.dtype).max) + 1)
    return state


def weights_sha256(model: keras.Model, collectives: Collectives | None = None) -> str:
    """A digest of the model's weights in order: equal digests mean bit-identical weights.

    That of a sharded table is of its rows in order, whatever the number of ranks. All ranks must call it.
    """
    collectives = collectives or runtime.collectives()

    def blocks() -> Iterator[np.ndarray]:
        for variable in model.weights:
            shard = row_shard_of(variable)
            if shard is None:
                yield host_array(variable)
            else:
                yield from blocks_on_first_rank(variable, shard, collectives)

    digest = sha256_of(blocks())
    return collectives.allgather(digest)[0] if has_tables(model) else digest


def sha256_of(arrays: Iterable[np.ndarray]) -> str:
    """A digest of the arrays' bytes, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_as_bytes(array))
    return digest.hexdigest()


def structure(model: keras.Model) -> dict[str, str]:
    """What the replicas of a model must have in common: each variable's path, shape and dtype.

    Without the numbers in automatic names: a rank may have made other models or optimizers before.
    """
    return {**_structure("model ", model.variables), **_structure("optimizer ", optimizer_variables(model))}


def _structure(owner: str, variables: Sequence[keras.Variable | tf.Variable]) -> dict[str, str]:
    return {
        f"{owner}variable {i}": f"{_NUMBER.sub('', path_of(variable))} {_shape(variable)}"
        for i, variable in enumerate(variables)
    }


def _shape(variable: keras.Variable | tf.Variable) -> str:
    return f"{tuple(variable.shape)} {tf.as_dtype(variable.dtype).name}"


def share_statistics(model: keras.Model, collectives: Collectives) -> list[tuple[keras.Variable, np.ndarray]]:
    """Averages weights that training does not update by gradients, such as BatchNorm's moving statistics.

    Only float weights that differ between ranks are changed: frozen ones stay bit-identical. Counters are combined as
    by :func:`share_counters`.

    Returns:
        The weights that were averaged, each with this rank's own value.
    """
    share_counters(model, collectives)
    counters = {id(variable) for variable in _counters(model)}
    statistics = whole_variables(model.non_trainable_weights)
    return share([v for v in statistics if id(v) not in counters], collectives)


def share_counters(model: keras.Model, collectives: Collectives) -> None:
    """Synchronizes integer weights, and weights with ``aggregation="sum"``; all ranks must call it.

    A weight that differs between ranks, or is to be summed, becomes its last common value plus the changes of all
    ranks, as one process would count. With ``aggregation="only_first_replica"`` it becomes rank 0's.
    """
    counters = _counters(model)
    if collectives.size == 1 or not counters:
        return
    split = differing(counters, collectives)
    summed = [v for v in counters if v.aggregation == "sum" or (v.aggregation != _FIRST and id(v) in split)]
    starts = [vars(variable).get("hvdtrain_common_value", 0) for variable in summed]
    changes = [variable.numpy() - start for variable, start in zip(summed, starts, strict=True)]
    for variable, start, change in zip(summed, starts, collectives.sum(changes), strict=True):
        variable.assign(start + change)
    collectives.broadcast([variable.value for variable in counters if variable.aggregation == _FIRST])
    note_equal_counters(model)


def note_equal_counters(model: keras.Model) -> None:
    """Records the values from which ranks count; call it where they are equal on all ranks."""
    for variable in _counters(model):
        vars(variable)["hvdtrain_common_value"] = variable.numpy()


def _counters(model: keras.Model) -> list[keras.Variable]:
    return [
        variable
        for variable in model.non_trainable_weights
        if variable.aggregation in ("sum", _FIRST) or keras.backend.is_int_dtype(variable.dtype)
    ]


def share(variables: Sequence[keras.Variable], collectives: Collectives) -> list[tuple[keras.Variable, np.ndarray]]:
    """Replaces float variables that differ between ranks by their mean; all ranks must call it.

    Returns:
        The variables that were averaged, each with this rank's own value.
    """
    split = differing(variables, collectives) if collectives.size > 1 else set()
    averaged = [variable for variable in variables if id(variable) in split]
    own = [variable.numpy() for variable in averaged]
    for variable, total in zip(averaged, collectives.sum(own), strict=True):
        variable.assign(total / collectives.size)
    return list(zip(averaged, own, strict=True))


@contextmanager
def shared_statistics(model: keras.Model, collectives: Collectives) -> Iterator[None]:
    """Averages the model's statistics for the duration of the block, then restores this rank's own.

    If they stayed averaged, the last bits of a run would depend on when it was evaluated. What a callback
    assigns meanwhile is kept.
    """
    with restored(share_statistics(model, collectives)):
        yield


@contextmanager
def restored(own: Sequence[tuple[keras.Variable, np.ndarray | tf.Tensor]]) -> Iterator[None]:
    """Restores this rank's own values of averaged variables after the block, unless others were assigned in it."""
    averaged = [host_array(variable) for variable, _ in own]
    try:
        yield
    finally:
        for (variable, value), before in zip(own, averaged, strict=True):
            if np.array_equal(host_array(variable), before):
                variable.assign(value)


def differing(variables: Sequence[keras.Variable], collectives: Collectives) -> set[int]:
    """The ids of the variables that are not equal on all ranks; all ranks must call it."""
    if collectives.size == 1:
        return set()  # One that trains independently of the others keeps its rank, so that it need not be rank 0.
    own = [_digest(variable) for variable in variables]
    # Not all digests from all ranks: with many variables and ranks, those would not fit into memory.
    first = collectives.allgather(own if collectives.rank == 0 else None)[0]
    differs = np.array([mine != other for mine, other in zip(own, first, strict=True)], np.float32)
    (num_ranks,) = collectives.sum([differs])
    return {id(variable) for variable, number in zip(variables, num_ranks, strict=True) if number}


def _digest(variable: keras.Variable) -> bytes:
    return hashlib.sha256(_as_bytes(host_array(variable))).digest()


def _as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def require_equal_replicas(
    model: keras.Model, collectives: Collectives, step: int, *, weights_only: bool = False
) -> None:
    """Compares all weights and optimizer variables over ranks; all ranks must call it.

    Raises:
        DivergenceError: on every rank, naming the rank and the variable that differ.
    """
    variables = whole_variables([*model.weights, *([] if weights_only else optimizer_variables(model))])
    require_equal_adapted_layers(model, collectives, step)
    with shared_statistics(model, collectives):
        require_equal_variables(
            variables,
            collectives,
            when=f"At step {step}",
            cause="It was changed other than by the optimizer, or memory is faulty.",
        )


def require_equal_variables(
    variables: Sequence[keras.Variable], collectives: Collectives, *, when: str, cause: str
) -> None:
    """Compares variables over ranks; all ranks must call it.

    Args:
        when: begins the sentence that says what differs.
        cause: the sentence after it.

    Raises:
        DivergenceError: on every rank, naming the rank and the variable that differ.
    """
    difference = first_difference(variables, collectives)
    if difference is not None:
        path, ranks = difference
        raise DivergenceError(
            f"replicas must be equal. {when} variable {path!r} of {ranks} differs from the other ranks'. {cause}"
        )


def first_difference(variables: Sequence[keras.Variable], collectives: Collectives) -> tuple[str, str] | None:
    """The path of the first variable that is not equal on all ranks, and the ranks that differ; None if all are.

    All ranks must call it.
    """
    split = differing(variables, collectives)
    if not split:
        return None
    variable = next(each for each in variables if id(each) in split)
    gathered = collectives.allgather((network.host_name(), _digest(variable)))
    # The most common value is assumed to be the correct one; among equals, the lowest rank's.
    usual = most_common([digest for _, digest in gathered])
    others = [rank for rank, (_, digest) in enumerate(gathered) if digest != usual]
    return path_of(variable), ranks_text(others, [host for host, _ in gathered])
