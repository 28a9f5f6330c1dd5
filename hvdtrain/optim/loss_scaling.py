"""The loss scale of float16 training: skipped steps, and a scale too small to be an overflow."""

import keras

from hvdtrain.config.wording import option
from hvdtrain.distributed.optimizers import leaves
from hvdtrain.errors import NonFiniteError
from hvdtrain.seams import keras_internals

_SMALLEST_SCALE = 2.0**-10


def overflowed_steps(optimizer: keras.optimizers.Optimizer, steps: int) -> int:
    """How many steps were not applied because a gradient overflowed; 0 without loss scaling."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return 0
    leaf = leaves(optimizer)[0]
    # Keras counts micro-batches, and leaves out those that overflow.
    return steps - int(keras_internals.ITERATIONS.of(leaf).numpy()) // (leaf.gradient_accumulation_steps or 1)


def loss_scale(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The factor by which losses are multiplied now; None without loss scaling."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built
    return float(optimizer.dynamic_scale.numpy()) if scales else None


def require_usable_loss_scale(optimizer: keras.optimizers.Optimizer, step: int, *, rank: int | None = None) -> None:
    """Distinguishes a NaN from an overflow: at such a small scale nothing overflows.

    Args:
        rank: the rank of this scale; None if it is the same on every rank.

    Raises:
        NonFiniteError: the scale has been halved too often.
    """
    scale = loss_scale(optimizer)
    if scale is not None and scale < _SMALLEST_SCALE:
        raise NonFiniteError(
            f"loss and gradients must be finite. At step {step} the loss scale has fallen to {scale:g}: the loss "
            "itself is not finite, or a gradient is at any scale. Lower the learning rate, clip gradients "
            f"({option('clip_norm', argument='global_clipnorm')}), or use bfloat16.",
            rank=rank,
        )
