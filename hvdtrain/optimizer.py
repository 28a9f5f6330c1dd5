"""``hvd.DistributedOptimizer``, working on Keras 3."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.collectives import Collectives
from hvdtrain.errors import UsageError

_COLLECTIVES = "_hvdtrain_collectives"


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    op: str = "average",
    compression: str = "none",
    groups: int | None = None,
    sparse_as_dense: bool = False,
    collectives: Collectives | None = None,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer apply gradients that are averaged over all ranks, and returns it.

    The gradients are reduced by Horovod right before Keras clips them, so that clipping, weight
    decay, moving averages and the update all see the averaged gradient; with
    ``gradient_accumulation_steps`` there is one reduction for all micro-batches. Under a
    ``LossScaleOptimizer`` (also the one that ``compile`` adds for ``mixed_float16``) all ranks skip
    a step together when any of them overflows.

    The optimizer keeps its class and its state, so that a saved model holds no trace of Horovod;
    wrap the optimizer again after loading one.

    Args:
        optimizer: any Keras optimizer, ``LossScaleOptimizer`` and ``MultiOptimizer`` included.
        op: ``average`` (equal to one process with the whole batch) or ``sum``.
        compression: ``none``, or ``fp16`` to send half the bytes at half precision.
        groups: reduce the gradients in this many messages; None lets Horovod choose by timing.
        sparse_as_dense: reduce ``IndexedSlices`` (embeddings) as dense tensors.
        collectives: what to reduce with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option breaks its rule, or the optimizer is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"optimizer must be a Keras optimizer. Received: {optimizer!r}")
    if is_distributed(optimizer):
        raise UsageError(f"{optimizer.name} is distributed already; wrap an optimizer once.")
    collectives = collectives or runtime.current().collectives
    for leaf in _leaves(optimizer):
        _reduce_before_clipping(
            leaf,
            collectives,
            op=op,
            compression=compression,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
        )
    return optimizer


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """True when the optimizer reduces its gradients across ranks."""
    return any(hasattr(leaf, _COLLECTIVES) for leaf in _leaves(optimizer))


def _leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that apply gradients, where the given one only hands them on."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _leaves(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)  # keras.optimizers.MultiOptimizer, from Keras 3.15 on
    if isinstance(inner, list) and inner:
        return [leaf for each in inner for leaf in _leaves(each)]
    return [optimizer]


def _reduce_before_clipping(optimizer: Any, collectives: Collectives, **options: Any) -> None:
    reduce = collectives.gradient_reducer(name=optimizer.name, **options)
    clip = optimizer._clip_gradients

    def reduce_then_clip(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return clip(reduce(gradients))

    # On the object, not on a subclass: Keras writes an optimizer's class into a saved model.
    optimizer._clip_gradients = reduce_then_clip
    setattr(optimizer, _COLLECTIVES, collectives)


_check_finite_here = keras.optimizers.LossScaleOptimizer.check_finite


def _check_finite_on_every_rank(self: Any, gradients: list[tf.Tensor]) -> tf.Tensor:
    """Keras decides for itself alone, and only the branch for finite gradients updates the variables.

    Rank 0 overflows and skips; rank 1 does not, reduces its gradients, and waits for rank 0 for ever.
    """
    finite = _check_finite_here(self, gradients)
    collectives = getattr(_leaves(self)[0], _COLLECTIVES, None)
    return finite if collectives is None or collectives.size == 1 else collectives.all_true(finite)


# On the class: model.compile() makes a LossScaleOptimizer of its own around a distributed optimizer.
keras.optimizers.LossScaleOptimizer.check_finite = _check_finite_on_every_rank
