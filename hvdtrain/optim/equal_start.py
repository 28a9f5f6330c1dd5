"""Checks at a distributed optimizer's first reduction that replicas are equal."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.replica_consistency import first_difference
from hvdtrain.errors import DivergenceError


class EqualStart:
    """Compares the variables of one optimizer over ranks, once."""

    def __init__(self, collectives: Collectives):
        self._is_compared = collectives.size == 1
        self._broadcast: Callable[[], object] | None = None

    def broadcast_first(self, broadcast: Callable[[], object]) -> None:
        """Makes replicas equal at the first reduction, before they are compared: for a model that is built there."""
        self._broadcast = broadcast

    def require(self, variables: Sequence[keras.Variable], collectives: Collectives) -> None:
        """Compares the variables at the first call. All ranks must call it when they trace or make their first step.

        Args:
            variables: all that the optimizer updates, its own included.

        Raises:
            DivergenceError: on every rank, if replicas are not equal.
        """
        if self._is_compared:
            return
        with tf.init_scope():
            # A step that creates variables is traced twice; they have values the second time.
            if not all(variable.value.is_initialized() for variable in variables):
                return
            self._is_compared = True
            if self._broadcast is not None:
                self._broadcast()
            difference = first_difference(variables, collectives)
        if difference is not None:
            path, ranks = difference
            raise DivergenceError(
                f"replicas must be equal when training begins. Received: variable {path!r} of {ranks} differs from the "
                "other ranks'. Call hvdtrain.broadcast(model) after model.compile, or pass "
                "hvdtrain.callbacks.BroadcastGlobalVariablesCallback() to model.fit."
            )
