"""Which losses can be averaged over ranks."""

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError


def sums_over_batch(model: keras.Model, op: str, gradient_accumulation_steps: int) -> bool:
    """Whether the model's losses sum over the batch; False if they average.

    Raises:
        UsageError: the losses of the ranks cannot be combined to the loss of the whole batch: a loss sums over the
            batch without ``op='sum'``.
    """
    losses = tf.nest.flatten(model.loss)
    for loss in losses:
        reduction = getattr(loss, "reduction", None)
        if reduction == "sum" and (op != "sum" or gradient_accumulation_steps > 1):
            raise UsageError(
                "a loss with reduction='sum' needs DistributedOptimizer(…, op='sum') and no gradient accumulation. "
                f"Received: {loss.name} with op={op!r}, gradient_accumulation_steps={gradient_accumulation_steps}. "
                "Or use reduction='sum_over_batch_size'."
            )
    summed = [getattr(loss, "reduction", None) == "sum" for loss in losses]
    if any(summed) and not all(summed):
        raise UsageError("either all losses must sum over the batch or none. Received: both kinds in one model.")
    return any(summed)
