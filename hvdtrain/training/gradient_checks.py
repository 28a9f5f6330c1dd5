"""Checks of a step's reduced gradients: measures them, and prevents the update if one is not finite."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import num_bytes
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, sum_of_elements, values_of
from hvdtrain.seams import tensorflow_internals
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.loss_marker import LossMarker
from hvdtrain.training.step_times import StepTimes

_NOT_FINITE = "hvdtrain: the averaged gradient is not finite"
HELD_BYTES = 16 << 20
"""Bytes of this rank's gradients that are kept until the step is known to be finite."""


class HostCheck:
    """Checks one optimizer's gradients; the host decides whether the step is made.

    A NaN of one rank is in the average of all: every rank finds it at the same step, without a further collective.

    Args:
        optimizer: its number among those of the model.
        on_nan: ``stop``: the step raises before anything is updated; ``skip``: it updates nothing; ``ignore``: it
            continues.
    """

    def __init__(self, optimizer: int, record: GradientRecord, marker: LossMarker, times: StepTimes, *, on_nan: str):
        self._optimizer = optimizer
        self._record = record
        self._marker = marker
        self._times = times
        self._ignores = on_nan == "ignore"
        self.applies = tf.Variable(True, trainable=False) if on_nan == "skip" else None

    def __call__(self, reduced: ReducedGradients, variables: Sequence[keras.Variable]) -> list[Gradient]:
        record = self._record
        half = reduced.total([_half_squared_norm(each) for each in reduced.buckets])
        self._times.record_reduction(reduced.sent, after=half)
        record.record_norm(self._optimizer, half)
        step = self._times.current_step()
        if record.copy_every:
            is_due = step % record.copy_every == 0
            keras.ops.cond(
                is_due, lambda: record.record_copies(reduced.gather(reduced.gradients), variables), lambda: None
            )
        if reduced.lost and record.compression_error_every:
            record.expect_compression()
            is_due = step % record.compression_error_every == 0
            keras.ops.cond(is_due, lambda: _record_compression_error(record, reduced), lambda: None)
        return reduced.gradients if self._ignores else self._if_finite(tf.math.is_finite(half), reduced, variables)

    def _if_finite(
        self, finite: tf.Tensor, reduced: ReducedGradients, variables: Sequence[keras.Variable]
    ) -> list[Gradient]:
        sent = _with_sums(reduced)

        # Not inlined: even if they do not run, the executor processes each of its operations at every step.
        @tf.function(autograph=False, experimental_attributes=tensorflow_internals.NO_INLINE)
        def record_culprits() -> list[tf.Tensor]:
            own = [tf.reduce_all(tf.math.is_finite(values_of(each))) for each in reduced.unpack(sent)]
            return self._record.record_culprits(variables, own, self._marker.is_finite)

        def skip() -> tf.Tensor:
            record_culprits()
            self._record.count_skipped(1)
            return tf.constant(False)

        def stop() -> tf.Tensor:
            with tf.control_dependencies(record_culprits()):
                tf.debugging.Assert(False, [_NOT_FINITE])
            return tf.constant(False)

        if self.applies is not None:
            self.applies.assign(finite)
        passed = tf.cond(finite, lambda: tf.constant(True), stop if self.applies is None else skip)
        with tf.control_dependencies([passed]):
            # Here and not before: each tensor that waits for a bucket costs a thread switch.
            return reduced.unpack([tf.identity(each) for each in reduced.buckets])


class DeviceCheck:
    """Checks the gradients of a step that XLA compiles as a whole, without the host: see :meth:`keeps_update`.

    XLA removes assertions, and a branch waits until the host has read its condition.
    """

    applies: tf.Variable | None = None

    def __init__(self, record: GradientRecord, marker: LossMarker, *, on_nan: str):
        self._record = record
        self._marker = marker
        self._on_nan = on_nan
        self._passed = tf.Variable(True, trainable=False)
        """While a step runs: whether its gradients are finite."""
        self.halted_at = tf.Variable(0, dtype=tf.int64, trainable=False)
        """With ``on_nan='stop'``: the first step that updates nothing; 0: none so far."""

    def begin(self) -> None:
        """Call it at the beginning of the cluster: a loss scale may skip the check."""
        self._passed.assign(True)

    def __call__(self, reduced: ReducedGradients, variables: Sequence[keras.Variable]) -> list[Gradient]:
        halves = tf.stack([_half_squared_norm(values_of(each)) for each in reduced.gradients])
        half = tf.reduce_sum(halves)
        self._record.record_norm(0, half)
        finite = tf.math.is_finite(half)
        self._passed.assign(self._passed & finite)  # A train_step may apply gradients more than once.
        is_first = ~finite & (self.halted_at == 0)
        self._record.record_culprits_if(is_first, variables, tf.math.is_finite(halves), self._marker.is_finite)
        return reduced.gradients

    def keeps_update(self, step: tf.Tensor) -> tf.Tensor | None:
        """Whether a step keeps the update that it has made; None: in any case. Call it in the same cluster.

        Args:
            step: its number.
        """
        passed = self._passed.read_value()
        if self._on_nan == "ignore":
            return None
        if self._on_nan == "skip":
            self._record.count_skipped(tf.cast(~passed, tf.int64))
            return passed
        was_halted = self.halted_at != 0
        self.halted_at.assign(tf.where(passed | was_halted, self.halted_at, step))
        return passed & ~was_halted


def host_checks(
    num_optimizers: int, record: GradientRecord, marker: LossMarker, times: StepTimes, *, on_nan: str
) -> list[HostCheck]:
    """The checks of a model's optimizers."""
    return [HostCheck(i, record, marker, times, on_nan=on_nan) for i in range(num_optimizers)]


def is_not_finite(error: BaseException) -> bool:
    """Whether a step raised this because of ``on_nan='stop'``."""
    return isinstance(error, tf.errors.InvalidArgumentError) and _NOT_FINITE in str(error)


def _half_squared_norm(bucket: tf.Tensor) -> tf.Tensor:
    # Squares of float16 overflow long before the gradient does.
    is_half = bucket.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tf.nn.l2_loss(tf.cast(bucket, tf.float32) if is_half else bucket), tf.float32)


def _record_compression_error(record: GradientRecord, reduced: ReducedGradients) -> None:
    lost, sent = (tf.add_n([_half_squared_norm(each) for each in part]) for part in (reduced.lost, reduced.sent))
    record.record_compression_error(lost, sent)


def _with_sums(reduced: ReducedGradients) -> list[tf.Tensor]:
    """The buckets as sent, up to ``HELD_BYTES`` together, and the sums of the others.

    Gradients are no longer needed once they are sent. Kept for the search for NaN, those of a large model would take
    as much memory as the model.
    """
    held, result = 0, []
    for i, bucket in enumerate(reduced.sent):
        if i in reduced.sums:
            result.append(reduced.sums[i])
        elif held + num_bytes(bucket) <= HELD_BYTES:
            held += num_bytes(bucket)
            result.append(bucket)
        else:
            result.append(sum_of_elements(bucket))
    return result
