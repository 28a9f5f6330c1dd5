"""What is seen of the gradients inside the compiled step: their norm, their numbers, and whether they are finite."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import Collectives, Gradient, Reduced, values_of
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.optimizer import distribution_of, leaves
from hvdtrain.timing.step_times import StepTimes

ON_NAN = ("stop", "skip", "ignore")
_NOT_FINITE = "hvdtrain: the averaged gradient is not finite"


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Where a loss or a gradient was not finite before gradients were averaged."""

    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank}"


class GradientWatch:
    """Watches a distributed optimizer's gradients after they were averaged, so that all ranks see the same.

    A NaN of one rank is in the average of all: every rank meets it at the same step without asking
    the others. A loss that is not finite is written into a gradient, and so found in the same way.

    Args:
        optimizer: a distributed optimizer.
        times: counts the steps.
        on_nan: ``stop``: the step raises before anything is updated; ``skip``: it updates nothing;
            ``ignore``: it goes on.
        copy_every: steps between copies of the averaged gradients, for histograms; 0: none.
        compression_error_every: steps between measurements of what compression loses.

    Raises:
        UsageError: ``on_nan`` is not known, or ``skip`` was asked of a MultiOptimizer.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        times: StepTimes,
        *,
        on_nan: str,
        copy_every: int = 0,
        compression_error_every: int = 1,
    ):
        if on_nan not in ON_NAN:
            raise UsageError(f"on_nan must be one of {', '.join(ON_NAN)}. Received: {on_nan!r}")
        self._leaves = leaves(optimizer)
        if on_nan == "skip" and len(self._leaves) > 1:
            raise UsageError(
                "on_nan='skip' needs one optimizer, for each decides about its own variables. Received: a "
                f"MultiOptimizer of {len(self._leaves)}. Use on_nan='stop'."
            )
        self._on_nan = on_nan
        self._times = times
        self._copy_every = copy_every
        self._compression_error_every = compression_error_every
        self._half_squared_norms = [tf.Variable(0.0, trainable=False) for _ in self._leaves]
        self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._compression_error = tf.Variable(0.0, trainable=False)
        self._loss_was_finite = tf.Variable(True, trainable=False)
        """When culprits were last looked for."""
        self._finite_so_far = tf.Variable(True, trainable=False)
        """Whether the loss is, in the micro-batches of the step under way; for steps of several."""
        self._loss_is_finite: tf.Tensor | bool = True
        """While a step is traced."""
        # By the identity of the variable: two layers may have the same path.
        self._positions: dict[int, int] = {}
        self._finite: tf.Variable | None = None
        """Whether each variable's gradient was, when that was last looked at; shape ``[variables]``."""
        self._copies: dict[int, tf.Variable] = {}
        self._paths: dict[int, str] = {}
        self._compresses = distribution_of(optimizer).compression == "fp16"
        self.applies: tf.Variable | None = None
        """Where steps may be skipped: whether the last one was not."""
        for i, leaf in enumerate(self._leaves):
            self._attach(i, leaf)

    def _attach(self, index: int, leaf: keras.optimizers.Optimizer) -> None:
        distribution = distribution_of(leaf)
        if self._on_nan == "skip":
            self.applies = tf.Variable(True, trainable=False)
        distribution.applies = self.applies

        def observe(reduced: Reduced, variables: Sequence[keras.Variable]) -> list[Gradient]:
            half = tf.add_n([tf.cast(tf.nn.l2_loss(each), tf.float32) for each in reduced.messages])
            self._times.note_reduction(reduced.sent, after=half)
            self._half_squared_norms[index].assign(half)
            step = self._times.step_under_way()
            if self._copy_every:
                keras.ops.cond(
                    step % self._copy_every == 0, lambda: self._copy(reduced.gradients, variables), lambda: None
                )
            if self._compresses:
                is_due = step % self._compression_error_every == 0
                keras.ops.cond(is_due, lambda: self._measure_compression(reduced.sent), lambda: None)
            finite = tf.math.is_finite(half)
            return self._decide(finite, reduced, variables, distribution.applies)

        distribution.observer = observe

    def _decide(
        self,
        finite: tf.Tensor,
        reduced: Reduced,
        variables: Sequence[keras.Variable],
        applies: tf.Variable | None,
    ) -> list[Gradient]:
        flags = self._finite
        assert flags is not None
        positions = [[self._positions[id(variable)]] for variable in variables]

        # Not inlined: even where they are not run, each of its operations is passed over at every step.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def note_culprits() -> None:
            own = [tf.math.is_finite(values_of(each)) for each in reduced.unpack(reduced.sent)]
            flags.scatter_nd_update(positions, [tf.reduce_all(each) for each in own])
            self._loss_was_finite.assign(self._loss_is_finite)

        def skip() -> tf.Tensor:
            note_culprits()
            self._skipped.assign_add(1)
            return tf.constant(False)

        def stop() -> tf.Tensor:
            note_culprits()
            with tf.control_dependencies([flags.read_value(), self._loss_was_finite.read_value()]):
                tf.debugging.Assert(False, [_NOT_FINITE])
            return tf.constant(False)

        if self._on_nan == "ignore":
            return reduced.gradients
        if applies is not None:
            applies.assign(finite)
        passed = tf.cond(finite, lambda: tf.constant(True), stop if applies is None else skip)
        with tf.control_dependencies([passed]):
            # Here and not before: each tensor that waits for a message costs a change of threads.
            return reduced.unpack([tf.identity(each) for each in reduced.messages])

    def _copy(self, reduced: Sequence[Gradient], variables: Sequence[keras.Variable]) -> None:
        for gradient, variable in zip(reduced, variables, strict=True):
            self._copies[id(variable)].assign(tf.cast(tf.convert_to_tensor(gradient), tf.float32))

    def _measure_compression(self, sent: Sequence[tf.Tensor]) -> None:
        values = [tf.cast(message, tf.float32) for message in sent]
        lost = [value - tf.cast(tf.cast(value, tf.float16), tf.float32) for value in values]
        self._compression_error.assign(tf.linalg.global_norm(lost) / tf.maximum(tf.linalg.global_norm(values), 1e-30))

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes room for what is noted of each variable's gradient; call it before the first step.

        Copies for histograms take as much memory as the model, and only if they are asked for.
        """
        with tf.device("CPU"):  # small, and only read from Python
            self._finite = tf.Variable(tf.ones(len(variables), tf.bool), trainable=False)
        for i, variable in enumerate(variables):
            self._positions[id(variable)] = i
            self._paths[id(variable)] = variable.path
            if self._copy_every:
                self._copies[id(variable)] = tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)

    def poison(self, loss: tf.Tensor | None, gradients: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Writes NaN into the smallest gradient where the loss is not finite, for the average to carry to all ranks.

        Args:
            loss: None where a train_step of the user's own does not tell.
        """
        result = list(gradients)
        dense = [i for i, gradient in enumerate(result) if isinstance(gradient, tf.Tensor)]
        self._loss_is_finite = True
        if loss is not None and dense:
            finite = self._loss_is_finite = tf.math.is_finite(loss)
            if self._times.micro_batches_per_step > 1:
                self._finite_so_far.assign(finite & (self._times.begins_step() | self._finite_so_far))
                self._loss_is_finite = self._finite_so_far.read_value()
            smallest = min(dense, key=lambda i: result[i].shape.num_elements() or np.inf)  # type: ignore[union-attr]
            gradient = result[smallest]
            result[smallest] = tf.where(finite, gradient, tf.constant(np.nan, gradient.dtype))  # type: ignore[union-attr]
        return result

    def norm(self) -> float:
        """The global norm of the last averaged gradient, before clipping."""
        return float(np.sqrt(2 * sum(float(each.numpy()) for each in self._half_squared_norms)))

    def skipped_steps(self) -> int:
        """Steps that were skipped so far, the same on every rank."""
        return int(self._skipped.numpy())

    def restore(self, skipped_steps: int) -> None:
        """Goes on counting from there."""
        self._skipped.assign(skipped_steps)

    def compression_error(self) -> float | None:
        """What fp16 last lost of this rank's gradient, as a share of its norm; None without compression."""
        return float(self._compression_error.numpy()) if self._compresses else None

    def copies(self) -> Mapping[str, np.ndarray]:
        """The averaged gradients at the last step for which copies are due, by the path of their variable."""
        return {self._paths[key]: copy.numpy() for key, copy in self._copies.items()}

    def culprits(self, collectives: Collectives) -> list[Culprit]:
        """Which ranks' loss or gradients were last not finite. Every rank has to call it."""
        own = [] if self._loss_was_finite.numpy() else ["the loss"]
        # A loss that is not finite leaves no gradient finite: it alone is named.
        if not own and self._finite is not None:
            flags = self._finite.numpy()
            own = [f"the gradient of {self._paths[key]!r}" for key, i in self._positions.items() if not flags[i]]
        everyone = collectives.allgather(own)
        ranks = range(len(everyone)) if len(everyone) > 1 else [collectives.rank]
        return [Culprit(rank, what) for rank, each in zip(ranks, everyone, strict=True) for what in each]

    def error(self, step: int, collectives: Collectives) -> NonFiniteError:
        """What to raise where :func:`is_not_finite` holds. Every rank has to call it."""
        return NonFiniteError(
            f"loss and gradients must be finite. At step {step}: {described(self.culprits(collectives))}. Nothing was "
            "updated by this step. Lower the learning rate, clip gradients (--clip-norm), look at the samples of this "
            "step, or go on without such steps with --on-nan skip.",
            rank=collectives.rank if collectives.size == 1 else None,
        )


def described(culprits: Sequence[Culprit]) -> str:
    """Some of the culprits in words."""
    if not culprits:
        return "the sum over ranks is not finite though each rank's gradient is (an overflow)"
    more = f" and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    return ", ".join(map(str, culprits[:3])) + more + (" is" if len(culprits) == 1 else " are") + " not finite"


def is_not_finite(error: BaseException) -> bool:
    """True for what a step raises under ``on_nan='stop'``."""
    return isinstance(error, tf.errors.InvalidArgumentError) and _NOT_FINITE in str(error)
