"""Records norms and non-finite values of a run's gradients, for logs and errors."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import NonFiniteError
from hvdtrain.loggers.config import LoggingConfig


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A loss or a gradient that was not finite before gradients were averaged."""

    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on rank {self.rank}"


class GradientRecord:
    """Norms, histogram data, compression errors and non-finite gradients; methods that record are called while traced.

    Args:
        num_optimizers: the number of optimizers of the model.
        copy_every: steps between copies of the averaged gradients, for histograms; 0: none.
        compression_error_every: steps between measurements of the compression error; 0: none.
    """

    def __init__(self, num_optimizers: int, *, copy_every: int = 0, compression_error_every: int = 0):
        self.copy_every = copy_every
        self.compression_error_every = compression_error_every
        self._half_squared_norms = [tf.Variable(0.0, trainable=False) for _ in range(num_optimizers)]
        self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._compression_error = tf.Variable(0.0, trainable=False)
        self._compresses = False
        self._loss_was_finite = tf.Variable(True, trainable=False)
        """When culprits were last recorded."""
        # By the identity of the variable: two layers may have the same path.
        self._positions: dict[int, int] = {}
        self._paths: dict[int, str] = {}
        self._copies: dict[int, tf.Variable] = {}

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state of each variable's gradient; call it before the first step.

        Copies for histograms take as much memory as the model, and exist only if histograms are enabled.
        """
        flags = tf.ones(len(variables), tf.bool)
        with tf.device("CPU"):  # small, and only read from Python
            self._finite_on_host = tf.Variable(flags, trainable=False)
        self._finite_on_device = tf.Variable(flags, trainable=False)
        """Whether each variable's gradient was finite when culprits were last recorded, by either kind of check."""
        for i, variable in enumerate(variables):
            self._positions[id(variable)] = i
            self._paths[id(variable)] = variable.path
            if self.copy_every:
                self._copies[id(variable)] = tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)

    def record_norm(self, optimizer: int, half_squared_norm: tf.Tensor) -> None:
        """Records the norm of an optimizer's averaged gradient, before clipping."""
        self._half_squared_norms[optimizer].assign(half_squared_norm)

    def record_copies(self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]) -> None:
        """Copies averaged gradients for histograms."""
        for gradient, variable in zip(gradients, variables, strict=True):
            self._copies[id(variable)].assign(tf.cast(tf.convert_to_tensor(gradient), tf.float32))

    def record_compression_error(self, half_squared_lost: tf.Tensor, half_squared_sent: tf.Tensor) -> None:
        """Records what compression left out of this rank's gradient."""
        self._compression_error.assign(tf.sqrt(half_squared_lost / tf.maximum(half_squared_sent, 1e-30)))

    def expect_compression(self) -> None:
        """Gradients are compressed in the step that is traced."""
        self._compresses = True

    def record_culprits(
        self, variables: Sequence[keras.Variable], finite: Sequence[tf.Tensor], loss_is_finite: tf.Tensor | bool
    ) -> list[tf.Tensor]:
        """Records which of this rank's gradients are finite; returns what exists when that is done."""
        self._finite_on_host.scatter_nd_update(self._places(variables), finite)
        self._loss_was_finite.assign(loss_is_finite)
        return [self._finite_on_host.read_value(), self._loss_was_finite.read_value()]

    def record_culprits_if(
        self,
        condition: tf.Tensor,
        variables: Sequence[keras.Variable],
        finite: tf.Tensor,
        loss_is_finite: tf.Tensor | bool,
    ) -> None:
        """The same in a cluster that XLA compiles, without a branch. ``finite``: shape ``[variables]``."""
        flags = self._finite_on_device
        own = tf.tensor_scatter_nd_update(tf.ones_like(flags), self._places(variables), finite)
        flags.assign(tf.where(condition, own, flags))
        self._loss_was_finite.assign(tf.where(condition, loss_is_finite, self._loss_was_finite))

    def _places(self, variables: Sequence[keras.Variable]) -> list[list[int]]:
        return [[self._positions[id(variable)]] for variable in variables]

    def count_skipped(self, number: tf.Tensor | int) -> None:
        """Adds to the number of skipped steps."""
        self._skipped.assign_add(tf.cast(number, tf.int64))

    # Read by Python, from here on.

    def norm(self) -> float:
        """The global norm of the last averaged gradient, before clipping."""
        return float(np.sqrt(2 * sum(float(each.numpy()) for each in self._half_squared_norms)))

    def skipped_steps(self) -> int:
        """Number of steps skipped so far, the same on every rank."""
        return int(self._skipped.numpy())

    def state(self) -> int:
        """What a checkpoint keeps of this rank."""
        return self.skipped_steps()

    def restore(self, skipped_steps: int) -> None:
        """Continues to count from this number."""
        self._skipped.assign(skipped_steps)

    def compression_error(self) -> float | None:
        """What compression left out of this rank's last gradient, relative to its norm; None without compression."""
        return float(self._compression_error.numpy()) if self._compresses else None

    def copies(self) -> Mapping[str, np.ndarray]:
        """The averaged gradients of the last step that copied them, by the path of their variable."""
        return {self._paths[key]: copy.numpy() for key, copy in self._copies.items()}

    def culprits(self, collectives: Collectives) -> list[Culprit]:
        """The ranks whose loss or gradients were last not finite; all ranks must call it."""
        own = [] if self._loss_was_finite.numpy() else ["the loss"]
        # A loss that is not finite leaves no gradient finite: only the loss is named.
        if not own:
            flags = self._finite_on_host.numpy() & self._finite_on_device.numpy()
            own = [f"the gradient of {self._paths[key]!r}" for key, i in self._positions.items() if not flags[i]]
        everyone = collectives.allgather(own)
        ranks = range(len(everyone)) if len(everyone) > 1 else [collectives.rank]
        return [Culprit(rank, what) for rank, each in zip(ranks, everyone, strict=True) for what in each]

    def error(self, step: int, collectives: Collectives) -> NonFiniteError:
        """The error of a step whose gradient was not finite; all ranks must call it."""
        return NonFiniteError(
            f"loss and gradients must be finite. At step {step}: {culprits_text(self.culprits(collectives))}. Nothing "
            "was updated by this step. Lower the learning rate, clip gradients "
            f"({option('clip_norm', argument='global_clipnorm')}), check the samples of this step, or skip such steps "
            f"({option('on_nan', 'skip')}).",
            rank=collectives.rank if collectives.size == 1 else None,
        )


def make_record(model: keras.Model, logging: LoggingConfig | None = None) -> GradientRecord:
    """The record of a model's steps, with what the logs need; by default norms only."""
    num_optimizers = len(leaves_of(model))
    if logging is None:
        return GradientRecord(num_optimizers)
    return GradientRecord(
        num_optimizers, copy_every=logging.histograms_every, compression_error_every=logging.log_every
    )


def culprits_text(culprits: Sequence[Culprit]) -> str:
    """Up to three culprits, for a message."""
    if not culprits:
        return "the sum over ranks is not finite though each rank's gradient is (an overflow)"
    more = f" and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    return ", ".join(map(str, culprits[:3])) + more + (" is" if len(culprits) == 1 else " are") + " not finite"
