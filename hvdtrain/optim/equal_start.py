"""Checks at a distributed optimizer's first reduction that replicas and optimizers are equal."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdtrain.distributed.agreement import ranks_text
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.initial_seeds import first_with_other_seed
from hvdtrain.distributed.replica_consistency import first_difference
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.distributed.snapshot import path_of, resource_of
from hvdtrain.errors import DivergenceError, UsageError
from hvdtrain.optim.equal_optimizers import require_equal_optimizers


class EqualStart:
    """Compares the variables of one optimizer over ranks, once."""

    def __init__(self, collectives: Collectives):
        self._is_compared = self._has_same_operations = collectives.size == 1
        self._broadcast: Callable[[], object] | None = None

    def broadcast_first(self, broadcast: Callable[[], object]) -> None:
        """Makes replicas equal at the first reduction, before they are compared: for a model that is built there."""
        self._broadcast = broadcast

    def require_same_gradients(
        self, places: Sequence[int], variables: Sequence[keras.Variable], collectives: Collectives
    ) -> None:
        """Compares at the first reduction which variables have gradients, see :func:`require_same_gradients`."""
        if not self._is_compared:
            names = [path_of(variable) for variable in variables]
            require_same_gradients(places, names, collectives)

    def require_same_operations(self, names: Sequence[str], collectives: Collectives) -> None:
        """Compares at the first step the names of the program's own Horovod operations in it.

        Raises:
            UsageError: on every rank: some have other names, and would wait for the others forever.
        """
        if self._has_same_operations:
            return
        self._has_same_operations = True
        with tf.init_scope():
            everyone = collectives.allgather(sorted(names))
        for rank, each in enumerate(everyone):
            if only := [name for name in each if name not in everyone[0]]:
                raise UsageError(_other_operations(f"{only[0]!r} on rank {rank}, and not on rank 0"))
            if only := [name for name in everyone[0] if name not in each]:
                raise UsageError(_other_operations(f"{only[0]!r} on rank 0, and not on rank {rank}"))

    def require(
        self,
        optimizer: keras.optimizers.Optimizer,
        reduction: ReductionConfig,
        variables: Sequence[keras.Variable],
        collectives: Collectives,
    ) -> None:
        """Compares optimizer and variables at the first call. All ranks must call it when they trace their first step.

        Args:
            reduction: how the optimizer's gradients are combined.
            variables: all that the optimizer updates alike on all ranks, its own included. Of sharded tables, the seeds
                of their rows are compared.

        Raises:
            DisagreementError: on every rank, if optimizers have different arguments.
            DivergenceError: on every rank, if replicas are not equal.
        """
        if self._is_compared:
            return
        with tf.init_scope():
            # A step that creates variables is traced twice; they have values the second time.
            if not all(resource_of(variable).is_initialized() for variable in variables):
                return
            self._is_compared = True
            require_equal_optimizers(optimizer, reduction, collectives)
            if self._broadcast is not None:
                self._broadcast()
            difference = first_difference(whole_variables(variables), collectives)
            other_seed = first_with_other_seed(variables, collectives)
        if other_seed is not None:
            raise DivergenceError(
                f"the rows of a table must be drawn from one seed on all ranks. Received: table {other_seed!r}, whose "
                "seeds differ between ranks. Call hvdtrain.broadcast(model) after model.compile, or "
                "hvdtrain.init(seed=…) before the model is made."
            )
        if difference is not None:
            path, ranks = difference
            raise DivergenceError(
                f"replicas must be equal when training begins. Received: variable {path!r} of {ranks} differs from the "
                "other ranks'. Call hvdtrain.broadcast(model) after model.compile, or pass "
                "hvdtrain.callbacks.BroadcastGlobalVariablesCallback() to model.fit."
            )


def require_same_gradients(places: Sequence[int], names: Sequence[str], collectives: Collectives) -> None:
    """Compares which variables have gradients: ranks reduce them by their places. All ranks must call it.

    Args:
        places: of the variables that have a gradient on this rank, among all that may have one.
        names: of these variables.

    Raises:
        UsageError: on every rank: some have gradients of other variables.
    """
    with tf.init_scope():
        everyone = collectives.allgather(dict(zip(places, names, strict=True)))
    for place in sorted({place for each in everyone for place in each}):
        ranks = [rank for rank, each in enumerate(everyone) if place in each]
        if len(ranks) < len(everyone):
            others = [rank for rank in range(len(everyone)) if rank not in ranks]
            hosts = [""] * len(everyone)
            raise UsageError(
                f"all ranks must have gradients of the same variables. Received: {everyone[ranks[0]][place]!r} has one "
                f"on {ranks_text(ranks, hosts)}, and none on {ranks_text(others, hosts)}. Let every rank's loss depend "
                "on all variables: multiply the part that its batch does not need by 0."
            )


def _other_operations(received: str) -> str:
    return (
        "Horovod's operations in a step must have the same names on all ranks, or ranks wait for each other forever. "
        f"Received: {received}. Call hvdtrain.gather or hvdtrain.average instead; or have all ranks make the same "
        "layers and models in the same order, by which Keras and TensorFlow name operations."
    )
