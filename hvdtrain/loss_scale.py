"""What the loss scale of float16 training tells about a run."""

import keras

from hvdtrain.errors import NonFiniteError
from hvdtrain.optimizer import leaves

_SMALLEST_SCALE = 2.0**-10


def overflowed_steps(optimizer: keras.optimizers.Optimizer, micro_batches: int) -> int:
    """How many of the micro-batches were not applied because a gradient overflowed; 0 without loss scaling."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return 0
    return micro_batches - int(leaves(optimizer)[0]._iterations.numpy())


def require_usable_loss_scale(optimizer: keras.optimizers.Optimizer, step: int, *, rank: int | None = None) -> None:
    """Tells a NaN from an overflow: no overflow is left at so small a scale.

    Args:
        rank: whose scale it is; None: the same on every rank.

    Raises:
        NonFiniteError: the scale was halved again and again.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
        scale = float(optimizer.dynamic_scale.numpy())
        if scale < _SMALLEST_SCALE:
            raise NonFiniteError(
                f"loss and gradients must be finite. At step {step} the loss scale has fallen to {scale:g}: the loss "
                "itself is not finite, or a gradient is at any scale. Lower the learning rate, clip gradients "
                "(--clip-norm), or use --mixed-precision bfloat16.",
                rank=rank,
            )
