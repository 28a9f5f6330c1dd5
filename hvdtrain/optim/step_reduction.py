"""The reduction of one step's gradients, as the hooks of an optimizer ask for it."""

from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    ReducedGradients,
    divided,
    reduced_but_local,
    with_shapes_of,
    without_left_out_samples,
)
from hvdtrain.optim.hook_state import GradientHooks


def reduce_step(hooks: GradientHooks, gradients: Sequence[Gradient]) -> ReducedGradients:
    """Reduces the gradients of ``hooks.variables``, except local ones, to their mean over samples."""
    gradients = with_shapes_of(hooks.variables, gradients)
    is_local = hooks.are_local(hooks.variables)
    if any(is_local):
        return reduced_but_local(hooks.reduce, gradients, is_local, hooks.share)
    if hooks.step_weight is None:
        return hooks.reduce(gradients)
    weight = hooks.step_weight()
    if hooks.sharded is None:
        return without_left_out_samples(hooks.reduce([*gradients, weight]))
    # Every rank divides its parts by the weight of all ranks.
    (total,) = hooks.sharded.sum_over_ranks([weight], "weight")
    return divided(hooks.reduce(gradients), total * tf.cast(hooks.share, total.dtype))
