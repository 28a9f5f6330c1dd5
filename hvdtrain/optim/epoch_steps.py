"""Counts the steps of an epoch in ``model.fit``, and ends it on all ranks when the data of one has ended."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compiled import compiled

_END_OF_DATA = "hvdtrain_end_of_data"


class EpochSteps:
    """Counts the steps of an epoch; for data of unknown length, ends it on all ranks when the data of one has ended.

    Then each step begins with one small reduction. A rank whose data has ended takes part in it once more, so that the
    others do not wait for it forever.
    """

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._ended_ranks: list[int] = []
        self._is_active = self._ends_together = False

    @property
    def made(self) -> int:
        """Number of steps since the epoch began. (Keras' iterations also count a step that has found no data.)"""
        return int(self._made.numpy())

    @property
    def is_active(self) -> bool:
        """Whether steps are counted."""
        return self._is_active

    def activate(self, *, ends_together: bool) -> bool:
        """Counts steps from now on.

        Args:
            ends_together: whether the length of the data is unknown.

        Returns:
            Whether compiled steps must be compiled again.
        """
        if not self._is_active:
            self._made = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._has_batch = tf.Variable(0.0, trainable=False)
            gather = self._collectives.gather_rows
            # Compiled: Horovod ignores the names of eager operations.
            self._gather = compiled(lambda has_ended: gather(has_ended[tf.newaxis], _END_OF_DATA)[:, 0])
        is_new = not self._is_active or self._ends_together != ends_together
        self._is_active, self._ends_together = True, ends_together
        return is_new

    def begin(self) -> None:
        """Before the first step of an epoch."""
        self._made.assign(0)
        self._ended_ranks = []

    def count(self, data: Any) -> Any:
        """At the beginning of a step: returns its data, when all ranks have theirs.

        Raises:
            tf.errors.OutOfRangeError: a rank has ended its epoch; data sets raise the same at their end.
        """
        parts = tf.nest.flatten(data, expand_composites=True)
        with tf.control_dependencies([each for each in parts if tf.is_tensor(each)]):
            # A variable, because TensorFlow would send a constant without waiting for a batch.
            has_ended = self._has_batch.read_value()
        checks = [has_ended]
        if self._ends_together:
            ended = self._gather(has_ended)
            checks = [
                tf.cond(
                    tf.reduce_any(ended > 0),
                    lambda: tf.numpy_function(self._interrupt, [ended], tf.bool),
                    lambda: tf.constant(True),
                )
            ]
        with tf.control_dependencies(checks):
            counted = [self._made.assign_add(1)]
        # No reduction of the step begins before that, not even one of the forward pass.
        with tf.control_dependencies(counted):
            parts = [tf.identity(each) if tf.is_tensor(each) else each for each in parts]
        return tf.nest.pack_sequence_as(data, parts, expand_composites=True)

    def end(self) -> list[int]:
        """After the last step of an epoch: the ranks whose data has ended. All ranks must call it."""
        if not self._ends_together:
            return list(range(self._collectives.size))
        # Those whose epoch was interrupted have been in this reduction, in their step.
        if not self._ended_ranks:
            self._ended_ranks = np.flatnonzero(self._gather(tf.constant(1.0))).tolist()
        return self._ended_ranks

    def _interrupt(self, ended: np.ndarray) -> bool:
        self._ended_ranks = np.flatnonzero(ended).tolist()
        raise StopIteration
