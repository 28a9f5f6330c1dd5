"""Which losses can be averaged over ranks."""

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError


def sums_over_batch(model: keras.Model, op: str, has_sample_weights: bool, accumulate: int) -> bool:
    """True where the model's losses sum over the batch, false where they average.

    Refuses a loss whose value over the whole batch is not what the optimizer makes of the ranks' values.

    Raises:
        UsageError: a loss sums over the batch, or divides by the batch's sum of weights.
    """
    losses = tf.nest.flatten(model.loss)
    for loss in losses:
        reduction = getattr(loss, "reduction", None)
        if reduction == "sum" and (op != "sum" or accumulate > 1):
            raise UsageError(
                f"a loss with reduction='sum' needs DistributedOptimizer(…, op='sum') and no accumulation. Received: "
                f"{loss.name} with op={op!r}, accumulate={accumulate}. Or use reduction='sum_over_batch_size'."
            )
        if reduction == "mean_with_sample_weight" and has_sample_weights:
            raise UsageError(
                f"reduction='mean_with_sample_weight' divides by each rank's own sum of weights. Received: "
                f"{loss.name} and samples with weights. Use reduction='sum_over_batch_size'."
            )
    summed = [getattr(loss, "reduction", None) == "sum" for loss in losses]
    if any(summed) and not all(summed):
        raise UsageError("either all losses must sum over the batch or none. Received: both kinds in one model.")
    return any(summed)
