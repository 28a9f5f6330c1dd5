"""Equal replicas: broadcast at the start, comparisons before and during training."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain import process, runtime
from hvdtrain.collectives import Collectives
from hvdtrain.errors import DisagreementError, DivergenceError, UsageError

# Far from any number of draws that a run makes, so that the streams of two ranks do not meet.
_SEED_STRIDE = 0x9E3779B9


def broadcast(model: keras.Model, *, collectives: Collectives | None = None) -> None:
    """Gives every rank rank 0's variables of the model and its optimizer; call it before the first step.

    Builds the optimizer. Each rank keeps a random stream of its own for dropout, derived from rank 0's.

    Raises:
        UsageError: the model is not built or not compiled.
    """
    collectives = collectives or runtime.current().collectives
    if not model.built or getattr(model, "optimizer", None) is None:
        raise UsageError(
            f"model {model.name!r} must be built and compiled before its variables are broadcast: give its first "
            "layer an Input, or call the model once on a batch."
        )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    collectives.broadcast([variable.value for variable in [*model.variables, *model.optimizer.variables]])
    for variable in random_streams(model):
        variable.assign(own_random_stream(variable.numpy(), collectives.rank))


def random_streams(model: keras.Model) -> list[keras.Variable]:
    """The states of the model's seed generators, as of dropout."""
    # Keras: a model's variables are weights, metrics and the states of seed generators.
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [variable for variable in model.variables if id(variable) not in others]


def own_random_stream(state: np.ndarray, rank: int) -> np.ndarray:
    """A rank's state of a seed generator, from rank 0's."""
    state = state.copy()
    state[0] = (int(state[0]) + rank * _SEED_STRIDE) % (int(np.iinfo(state.dtype).max) + 1)
    return state


def weights_sha256(model: keras.Model) -> str:
    """A digest of the model's weights in order: equal digests mean bit-identical weights."""
    return sha256_of(variable.numpy() for variable in model.weights)


def sha256_of(arrays: Iterable[np.ndarray]) -> str:
    """A digest of the arrays' bytes, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def weights_by_path(model: keras.Model) -> dict[str, np.ndarray]:
    """The values of the trainable weights."""
    return {variable.path: variable.numpy() for variable in model.trainable_variables}


def structure(model: keras.Model) -> dict[str, str]:
    """What two replicas of a model must share: each variable's path, shape and dtype."""
    variables = [("model", model.weights), ("optimizer", model.optimizer.variables)]
    return {
        f"{owner} variable {i}": f"{variable.path} {tuple(variable.shape)} {variable.dtype}"
        for owner, group in variables
        for i, variable in enumerate(group)
    }


def require_agreement(what: str, facts: Mapping[str, Any], collectives: Collectives) -> None:
    """Compares facts over ranks; every rank has to call it.

    Raises:
        DisagreementError: on every rank, with the difference, where a fact is not the same everywhere.
    """
    gathered = collectives.allgather((process.host_name(), dict(facts)))
    hosts, all_facts = [host for host, _ in gathered], [each for _, each in gathered]
    differences = []
    for key in sorted({key for each in all_facts for key in each}):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(all_facts):
            by_value.setdefault(repr(each.get(key, "missing")), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks, hosts)}" for value, ranks in by_value.items())
            differences.append(f"{key}: {values}")
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise DisagreementError(
            f"all ranks must have the same {what}. Received: {'; '.join(differences[:5])}{more}. "
            "Start every rank with the same command, code and files."
        )


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    if len(set(hosts)) == 1:
        return named
    theirs = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{named} (host{'s' if len(theirs) > 1 else ''} {', '.join(theirs)})"


def share_statistics(model: keras.Model, collectives: Collectives) -> list[tuple[keras.Variable, np.ndarray]]:
    """Averages what training updates outside of the gradients, such as BatchNorm's moving statistics.

    Only float weights that differ between ranks are touched: frozen ones keep their bits.

    Returns:
        The weights that were averaged, each with the value that was this rank's own.
    """
    weights = [v for v in model.non_trainable_weights if keras.backend.is_float_dtype(v.dtype)]
    return share(weights, collectives)


def share(variables: Sequence[keras.Variable], collectives: Collectives) -> list[tuple[keras.Variable, np.ndarray]]:
    """Gives float variables that differ between ranks their mean; every rank has to call it.

    Returns:
        Those that did, each with the value that was this rank's own.
    """
    split = differing(variables, collectives) if collectives.size > 1 else set()
    moving = [variable for variable in variables if id(variable) in split]
    own = [variable.numpy() for variable in moving]
    for variable, total in zip(moving, collectives.sum(own), strict=True):
        variable.assign(total / collectives.size)
    return list(zip(moving, own, strict=True))


@contextmanager
def shared_statistics(model: keras.Model, collectives: Collectives) -> Iterator[None]:
    """The model has the averaged statistics inside, and this rank's own again after.

    Were they left averaged, a run's last bits would depend on when somebody has looked at it. What a
    callback has put there meanwhile stays.
    """
    with returned(share_statistics(model, collectives)):
        yield


@contextmanager
def returned(own: Sequence[tuple[keras.Variable, np.ndarray]]) -> Iterator[None]:
    """Variables that were shared have the values that were this rank's own again after, unless others were put in."""
    shared = [variable.numpy() for variable, _ in own]
    yield
    for (variable, value), before in zip(own, shared, strict=True):
        if np.array_equal(variable.numpy(), before):
            variable.assign(value)


def differing(variables: Sequence[keras.Variable], collectives: Collectives) -> set[int]:
    """The ids of the variables that are not equal on all ranks; every rank has to call it."""
    digests = collectives.allgather([_digest(variable) for variable in variables])
    return {id(v) for i, v in enumerate(variables) if len({each[i] for each in digests}) > 1}


def _digest(variable: keras.Variable) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(variable.numpy()).tobytes()).digest()


def require_equal_replicas(
    model: keras.Model, collectives: Collectives, step: int, *, weights_only: bool = False
) -> None:
    """Compares all weights and optimizer variables over ranks; every rank has to call it.

    Raises:
        DivergenceError: on every rank, naming the rank and the variable that differ.
    """
    variables = [*model.weights, *([] if weights_only else model.optimizer.variables)]
    with shared_statistics(model, collectives):
        gathered = collectives.allgather((process.host_name(), [_digest(variable) for variable in variables]))
    hosts, digests = [host for host, _ in gathered], [each for _, each in gathered]
    for i, variable in enumerate(variables):
        values = [each[i] for each in digests]
        # The most common value is taken for the right one; among equals, the lowest rank's.
        usual = max(values, key=values.count)
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            raise DivergenceError(
                f"replicas must be equal. At step {step} variable {variable.path!r} of {_ranks(others, hosts)} differs "
                "from the other ranks'. Something there changed it outside of the optimizer, or its memory failed."
            )
