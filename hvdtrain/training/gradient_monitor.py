"""Monitors gradients inside the compiled step: their norm, their values, and whether they are finite."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import is_large, num_bytes
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, sum_of_elements, values_of
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.optim.distributed_optimizer import require_hooks
from hvdtrain.training.step_times import StepTimes

_NOT_FINITE = "hvdtrain: the averaged gradient is not finite"
_HELD_BYTES = 16 << 20
"""Of this rank's gradients, so many bytes are kept until the step is known to be finite."""


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A loss or a gradient that was not finite before gradients were averaged."""

    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank}"


class GradientMonitor:
    """Monitors a distributed optimizer's gradients after they are averaged, so that all ranks see the same.

    A NaN of one rank is in the average of all: every rank finds it at the same step, without a further collective. A
    loss that is not finite is written into a gradient, and found in the same way.

    Args:
        model: its optimizers are distributed.
        times: counts the steps.
        on_nan: ``stop``: the step raises before anything is updated; ``skip``: it updates nothing; ``ignore``: it
            continues.
        copy_every: steps between copies of the averaged gradients, for histograms; 0: none.
        compression_error_every: steps between measurements of the compression error.

    Raises:
        UsageError: ``skip`` with several optimizers.
    """

    def __init__(
        self,
        model: keras.Model,
        times: StepTimes,
        *,
        on_nan: str,
        copy_every: int = 0,
        compression_error_every: int = 1,
    ):
        self._leaves = leaves_of(model)
        if on_nan == "skip" and len(self._leaves) > 1:
            raise UsageError(
                "on_nan='skip' needs one optimizer, because each decides about its own variables. Received: "
                f"{len(self._leaves)}. Use on_nan='stop'."
            )
        self._on_nan = on_nan
        self._times = times
        self._copy_every = copy_every
        self._compression_error_every = compression_error_every
        self._half_squared_norms = [tf.Variable(0.0, trainable=False) for _ in self._leaves]
        self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._compression_error = tf.Variable(0.0, trainable=False)
        self._loss_was_finite = tf.Variable(True, trainable=False)
        """When culprits were last recorded."""
        self._finite_so_far = tf.Variable(True, trainable=False)
        """Whether the loss is finite in the micro-batches of the current step; for steps of several, or in halves."""
        self._loss_is_finite: tf.Tensor | bool = True
        """While a step is traced."""
        self._loss_was_computed_finite: tf.Tensor | bool = True
        """While the update of a step is traced whose gradients were computed by another compiled function."""
        # By the identity of the variable: two layers may have the same path.
        self._positions: dict[int, int] = {}
        self._finite: tf.Variable | None = None
        """Whether each variable's gradient was finite when culprits were last recorded; shape ``[variables]``."""
        self._finite_on_device: tf.Variable | None = None
        """The same, of steps that XLA compiles as a whole."""
        self._passed = tf.Variable(True, trainable=False)
        """While a whole step runs that XLA compiled: whether its gradient is finite."""
        self._halted_at = tf.Variable(0, dtype=tf.int64, trainable=False)
        """The step from which on nothing is updated, because its gradient was not finite; 0: none so far."""
        self._copies: dict[int, tf.Variable] = {}
        self._paths: dict[int, str] = {}
        self._compresses = False
        """Whether gradients are compressed in the step that was traced."""
        self.applies: tf.Variable | None = None
        """If steps may be skipped: whether the last one was not."""
        for i, leaf in enumerate(self._leaves):
            self._attach(i, leaf)

    def _attach(self, index: int, leaf: keras.optimizers.Optimizer) -> None:
        hooks = require_hooks(leaf)
        if self._on_nan == "skip":
            self.applies = tf.Variable(True, trainable=False)
        hooks.applies = self.applies

        def monitor(reduced: ReducedGradients, variables: Sequence[keras.Variable]) -> list[Gradient]:
            (half,) = reduced.sum_over_ranks([tf.add_n([_half_squared_norm(each) for each in reduced.buckets])])
            self._times.record_reduction(reduced.sent, after=half)
            self._half_squared_norms[index].assign(half)
            step = self._times.current_step()
            if self._copy_every:
                keras.ops.cond(step % self._copy_every == 0, lambda: self._copy(reduced, variables), lambda: None)
            if reduced.lost:
                self._compresses = True
                is_due = step % self._compression_error_every == 0
                keras.ops.cond(is_due, lambda: self._measure_compression(reduced), lambda: None)
            finite = tf.math.is_finite(half)
            return self._decide(finite, reduced, variables, hooks.applies)

        hooks.monitor = monitor

    def _decide(
        self,
        finite: tf.Tensor,
        reduced: ReducedGradients,
        variables: Sequence[keras.Variable],
        applies: tf.Variable | None,
    ) -> list[Gradient]:
        flags = self._finite
        assert flags is not None
        positions = [[self._positions[id(variable)]] for variable in variables]
        sent = _with_sums(reduced)

        # Not inlined: even if they do not run, the executor processes each of its operations at every step.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def record_culprits() -> None:
            own = [tf.math.is_finite(values_of(each)) for each in reduced.unpack(sent)]
            flags.scatter_nd_update(positions, [tf.reduce_all(each) for each in own])
            self._loss_was_finite.assign(self._loss_is_finite)

        def skip() -> tf.Tensor:
            record_culprits()
            self._skipped.assign_add(1)
            return tf.constant(False)

        def stop() -> tf.Tensor:
            record_culprits()
            with tf.control_dependencies([flags.read_value(), self._loss_was_finite.read_value()]):
                tf.debugging.Assert(False, [_NOT_FINITE])
            return tf.constant(False)

        if self._on_nan == "ignore":
            return reduced.gradients
        if applies is not None:
            applies.assign(finite)
        passed = tf.cond(finite, lambda: tf.constant(True), stop if applies is None else skip)
        with tf.control_dependencies([passed]):
            # Here and not before: each tensor that waits for a bucket costs a thread switch.
            return reduced.unpack([tf.identity(each) for each in reduced.buckets])

    @contextlib.contextmanager
    def deciding_on_device(self) -> Iterator[None]:
        """In the block, which XLA compiles, gradients are checked without the host; call :meth:`keeps_update` after it.

        XLA leaves out assertions, and a branch waits until the host has read its condition.
        """
        hooks = [require_hooks(leaf) for leaf in self._leaves]
        before = [(each.monitor, each.applies) for each in hooks]
        for i, each in enumerate(hooks):
            each.monitor, each.applies = functools.partial(self._check_on_device, i), None
        self._passed.assign(True)  # A loss scale may skip the check.
        try:
            yield
        finally:
            for each, (monitor, applies) in zip(hooks, before, strict=True):
                each.monitor, each.applies = monitor, applies

    def _check_on_device(
        self, index: int, reduced: ReducedGradients, variables: Sequence[keras.Variable]
    ) -> list[Gradient]:
        halves = tf.stack([_half_squared_norm(values_of(each)) for each in reduced.gradients])
        half = tf.reduce_sum(halves)
        self._half_squared_norms[index].assign(half)
        finite = tf.math.is_finite(half)
        self._passed.assign(self._passed & finite)  # A train_step may apply gradients more than once.
        flags = self._finite_on_device
        assert flags is not None
        positions = [[self._positions[id(variable)]] for variable in variables]
        own = tf.tensor_scatter_nd_update(tf.ones_like(flags), positions, tf.math.is_finite(halves))
        is_first = ~finite & (self._halted_at == 0)
        flags.assign(tf.where(is_first, own, flags))
        self._loss_was_finite.assign(tf.where(is_first, self._loss_is_finite, self._loss_was_finite))
        return reduced.gradients

    def keeps_update(self, step: tf.Tensor) -> tf.Tensor | None:
        """Whether a step keeps the update that it has made; None: in any case. Call it in the same cluster.

        Args:
            step: its number.
        """
        passed = self._passed.read_value()
        if self._on_nan == "ignore":
            return None
        if self.applies is not None:
            self._skipped.assign_add(tf.cast(~passed, tf.int64))
            self.applies.assign(passed)
            return passed
        was_halted = self._halted_at != 0
        self._halted_at.assign(tf.where(passed | was_halted, self._halted_at, step))
        return passed & ~was_halted

    @property
    def halted_at(self) -> tf.Variable:
        """The step from which on a step that XLA compiles as a whole updates nothing; 0: none so far."""
        return self._halted_at

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are copied for histograms."""
        return self._copy_every > 0

    def _copy(self, reduced: ReducedGradients, variables: Sequence[keras.Variable]) -> None:
        for gradient, variable in zip(reduced.gather(reduced.gradients), variables, strict=True):
            self._copies[id(variable)].assign(tf.cast(tf.convert_to_tensor(gradient), tf.float32))

    def _measure_compression(self, reduced: ReducedGradients) -> None:
        lost, sent = (tf.add_n([_half_squared_norm(each) for each in part]) for part in (reduced.lost, reduced.sent))
        self._compression_error.assign(tf.sqrt(lost / tf.maximum(sent, 1e-30)))

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state of each variable's gradient; call it before the first step.

        Copies for histograms take as much memory as the model, and exist only if histograms are enabled.
        """
        with tf.device("CPU"):  # small, and only read from Python
            self._finite = tf.Variable(tf.ones(len(variables), tf.bool), trainable=False)
        self._finite_on_device = tf.Variable(tf.ones(len(variables), tf.bool), trainable=False)
        for i, variable in enumerate(variables):
            self._positions[id(variable)] = i
            self._paths[id(variable)] = variable.path
            if self._copy_every:
                self._copies[id(variable)] = tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)

    def mark_non_finite(self, loss: tf.Tensor | None, gradients: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Writes NaN into the smallest gradient if the loss is not finite, for the average to carry to all ranks.

        Args:
            loss: None if a user's own train_step does not pass it to ``scale_loss``.
        """
        result = list(gradients)
        dense = [i for i, gradient in enumerate(result) if isinstance(gradient, tf.Tensor)]
        self._loss_is_finite = self._loss_was_computed_finite
        if loss is not None and dense:
            finite = self._loss_is_finite = tf.math.is_finite(loss)
            if self._times.micro_batches_per_step > 1:
                self._finite_so_far.assign(finite & (self._times.begins_step() | self._finite_so_far))
                self._loss_is_finite = self._finite_so_far.read_value()
            smallest = min(dense, key=lambda i: result[i].shape.num_elements() or np.inf)  # type: ignore[union-attr]
            gradient = result[smallest]
            result[smallest] = _nan_unless(finite, gradient)
        return result

    def end_gradients(self) -> None:
        """Keeps whether the loss is finite; call it in a compiled function that computes gradients for another one."""
        self._finite_so_far.assign(self._loss_is_finite)

    @contextlib.contextmanager
    def update_of(self, has_contributed: tf.Tensor) -> Iterator[None]:
        """The block, in that other one, applies the gradients; this rank's loss counts if it has contributed."""
        self._loss_was_computed_finite = self._finite_so_far.read_value() | ~has_contributed
        try:
            yield
        finally:
            self._loss_was_computed_finite = True

    def norm(self) -> float:
        """The global norm of the last averaged gradient, before clipping."""
        return float(np.sqrt(2 * sum(float(each.numpy()) for each in self._half_squared_norms)))

    def skipped_steps(self) -> int:
        """Number of steps skipped so far, the same on every rank."""
        return int(self._skipped.numpy())

    def restore(self, skipped_steps: int) -> None:
        """Continues to count from this number."""
        self._skipped.assign(skipped_steps)

    def compression_error(self) -> float | None:
        """What compression left out of this rank's last gradient, relative to its norm; None without compression."""
        return float(self._compression_error.numpy()) if self._compresses else None

    def copies(self) -> Mapping[str, np.ndarray]:
        """The averaged gradients at the last step for which copies were due, by the path of their variable."""
        return {self._paths[key]: copy.numpy() for key, copy in self._copies.items()}

    def culprits(self, collectives: Collectives) -> list[Culprit]:
        """The ranks whose loss or gradients were last not finite; all ranks must call it."""
        own = [] if self._loss_was_finite.numpy() else ["the loss"]
        # A loss that is not finite leaves no gradient finite: only the loss is named.
        if not own and self._finite is not None and self._finite_on_device is not None:
            flags = self._finite.numpy() & self._finite_on_device.numpy()
            own = [f"the gradient of {self._paths[key]!r}" for key, i in self._positions.items() if not flags[i]]
        everyone = collectives.allgather(own)
        ranks = range(len(everyone)) if len(everyone) > 1 else [collectives.rank]
        return [Culprit(rank, what) for rank, each in zip(ranks, everyone, strict=True) for what in each]

    def error(self, step: int, collectives: Collectives) -> NonFiniteError:
        """The error to raise after :func:`is_not_finite`; all ranks must call it."""
        return NonFiniteError(
            f"loss and gradients must be finite. At step {step}: {culprits_text(self.culprits(collectives))}. Nothing "
            "was updated by this step. Lower the learning rate, clip gradients (--clip-norm), check the samples of "
            "this step, or skip such steps with --on-nan skip.",
            rank=collectives.rank if collectives.size == 1 else None,
        )


def _half_squared_norm(bucket: tf.Tensor) -> tf.Tensor:
    # Squares of float16 overflow long before the gradient does.
    is_half = bucket.dtype in (tf.float16, tf.bfloat16)
    return tf.cast(tf.nn.l2_loss(tf.cast(bucket, tf.float32) if is_half else bucket), tf.float32)


def _nan_unless(finite: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    nan = tf.constant(np.nan, gradient.dtype)
    if not is_large(gradient):
        return tf.where(finite, gradient, nan)
    # A copy takes memory; TensorFlow writes one element in place.
    first = [[0] * gradient.shape.rank]
    return tf.tensor_scatter_nd_update(gradient, first, tf.where(finite, tf.gather_nd(gradient, first), nan))


def _with_sums(reduced: ReducedGradients) -> list[tf.Tensor]:
    """The buckets as sent, up to ``_HELD_BYTES`` together, and of others the sums.

    Gradients are no longer needed once they are sent. Kept for the search for NaN, those of a large model would take
    as much memory as the model.
    """
    held, result = 0, []
    for i, bucket in enumerate(reduced.sent):
        if i in reduced.sums:
            result.append(reduced.sums[i])
        elif held + num_bytes(bucket) <= _HELD_BYTES:
            held += num_bytes(bucket)
            result.append(bucket)
        else:
            result.append(sum_of_elements(bucket))
    return result


def culprits_text(culprits: Sequence[Culprit]) -> str:
    """Up to three culprits, for a message."""
    if not culprits:
        return "the sum over ranks is not finite though each rank's gradient is (an overflow)"
    more = f" and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    return ", ".join(map(str, culprits[:3])) + more + (" is" if len(culprits) == 1 else " are") + " not finite"


def is_not_finite(error: BaseException) -> bool:
    """Whether a step raised this because of ``on_nan='stop'``."""
    return isinstance(error, tf.errors.InvalidArgumentError) and _NOT_FINITE in str(error)
