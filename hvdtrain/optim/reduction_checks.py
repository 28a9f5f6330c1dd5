"""What a distributed optimizer checks before it reduces: replicas are equal, and no rank has run out of data."""

import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient, values_of
from hvdtrain.distributed.replica_consistency import first_difference
from hvdtrain.errors import DivergenceError

_END_OF_DATA = "hvdtrain_end_of_data"


class EpochSteps:
    """Counts the steps of an epoch; for data of unknown length, ends it on all ranks when the data of one has ended.

    Then one small reduction precedes that of each step. A rank whose data has ended joins it once more, instead of
    leaving the others to wait for its gradients forever.
    """

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._made = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._ended_ranks: list[int] = []
        self.ends_together = False
        """Whether the length of the data is unknown; compiled steps must be compiled anew when it changes."""

    @property
    def made(self) -> int:
        """Number of reductions since the epoch began. (Keras' iterations also count a step that has found no data.)"""
        return int(self._made.numpy())

    def begin(self) -> None:
        """Before the first step of an epoch."""
        self._made.assign(0)
        self._ended_ranks = []

    def count(self, gradient: tf.Tensor) -> list[tf.Operation]:
        """In a step: raises OutOfRangeError, as a data set does at its end, if a rank has ended its epoch.

        Args:
            gradient: any of this rank, which exists only if it has a batch.
        """
        # False, of which TensorFlow makes no constant: that would be sent without a batch.
        has_ended = tf.cast(tf.reduce_any(tf.math.is_nan(gradient) & tf.math.is_inf(gradient)), tf.float32)
        if not self.ends_together:
            with tf.control_dependencies([has_ended]):
                return [self._made.assign_add(1)]
        ended = self._gather(has_ended)
        checked = tf.cond(
            tf.reduce_any(ended > 0),
            lambda: tf.numpy_function(self._interrupt, [ended], tf.bool),
            lambda: tf.constant(True),
        )
        with tf.control_dependencies([checked]):
            return [self._made.assign_add(1)]

    def end(self) -> list[int]:
        """After the last step of an epoch: the ranks whose data has ended. All ranks must call it."""
        if not self.ends_together:
            return list(range(self._collectives.size))
        # Those whose epoch was interrupted have been in this reduction, in their step.
        if not self._ended_ranks:
            # Compiled: Horovod ignores the names of eager operations.
            self._ended_ranks = np.flatnonzero(tf.function(self._gather)(tf.constant(1.0))).tolist()
        return self._ended_ranks

    def _gather(self, has_ended: tf.Tensor) -> tf.Tensor:
        """Whether each rank has ended the epoch, shape ``[size]``."""
        return self._collectives.gather_rows(has_ended[tf.newaxis], _END_OF_DATA)[:, 0]

    def _interrupt(self, ended: np.ndarray) -> bool:
        self._ended_ranks = np.flatnonzero(ended).tolist()
        raise StopIteration


class ReductionChecks:
    """The checks of one optimizer."""

    def __init__(self, collectives: Collectives):
        self._is_compared = collectives.size == 1
        self.broadcast: Callable[[], None] | None = None
        """If not None, makes replicas equal at the first reduction: for a model that is built in its first step."""
        self.epoch_steps: EpochSteps | None = None
        """If not None, counts steps; compiled steps must be compiled anew when it changes."""

    def run(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable], collectives: Collectives
    ) -> list[tf.Operation]:
        """Returns what must precede the reduction in a compiled step.

        Args:
            gradients: of this rank.
            variables: all that the optimizer updates, its own included.

        Raises:
            DivergenceError: on every rank, at the first reduction, if replicas are not equal.
        """
        if not self._is_compared:
            # While a step is traced, which all ranks do when they make their first: compiled steps do not change.
            with tf.init_scope():
                # A step that creates variables is traced twice; they have values the second time.
                if all(variable.value.is_initialized() for variable in variables):
                    self._is_compared = True
                    if self.broadcast is not None:
                        self.broadcast()
                    _require_equal_start(variables, collectives)
        if self.epoch_steps is None:
            return []
        return self.epoch_steps.count(min(map(values_of, gradients), key=_num_elements))


def _require_equal_start(variables: Sequence[keras.Variable], collectives: Collectives) -> None:
    difference = first_difference(variables, collectives)
    if difference is not None:
        path, ranks = difference
        raise DivergenceError(
            f"replicas must be equal when training begins. Received: variable {path!r} of {ranks} differs from the "
            "other ranks'. Call hvdtrain.broadcast(model) after model.compile, or pass "
            "hvdtrain.callbacks.BroadcastGlobalVariablesCallback() to model.fit."
        )


def _num_elements(gradient: tf.Tensor) -> float:
    return gradient.shape.num_elements() or math.inf
