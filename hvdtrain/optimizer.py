"""``hvd.DistributedOptimizer``, working on Keras 3."""

import dataclasses
import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.collectives import Collectives, GradientReducer
from hvdtrain.errors import UsageError

_ATTRIBUTE = "_hvdtrain_distribution"


@dataclasses.dataclass(frozen=True)
class _Distribution:
    """What a distributed optimizer carries."""

    collectives: Collectives
    reduce: GradientReducer
    bytes_per_value: int | None
    """On the wire; None: those of the gradient's dtype."""


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
        reduce = collectives.gradient_reducer(
            name=leaf.name, op=op, compression=compression, groups=groups, sparse_as_dense=sparse_as_dense
        )
        _reduce_before_clipping(leaf, _Distribution(collectives, reduce, 2 if compression == "fp16" else None))
    return optimizer


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """True when the optimizer reduces its gradients across ranks."""
    return any(hasattr(leaf, _ATTRIBUTE) for leaf in _leaves(optimizer))


def _leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that apply gradients, where the given one only hands them on."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _leaves(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)  # keras.optimizers.MultiOptimizer, from Keras 3.15 on
    if not isinstance(inner, list):
        return [optimizer]
    if not inner:
        raise UsageError(
            "a MultiOptimizer made from a function has no optimizers before it is built. Call "
            "optimizer.build(model.trainable_variables) before DistributedOptimizer(optimizer)."
        )
    return [leaf for each in inner for leaf in _leaves(each)]


def _reduce_before_clipping(optimizer: Any, distribution: _Distribution) -> None:
    clip, apply = optimizer._clip_gradients, optimizer.apply
    reductions = 0

    def reduce_then_clip(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        nonlocal reductions
        reductions += 1
        return clip(distribution.reduce(gradients))

    def apply_and_check(grads: list[tf.Tensor], trainable_variables: Any = None) -> None:
        before = reductions
        apply(grads, trainable_variables)
        # Unreduced training looks healthy: every rank's loss falls. An optimizer of the user's own may not clip.
        if len(grads) > 0 and reductions == before:
            raise UsageError(
                "gradients must pass through Keras' _clip_gradients, where they are averaged. "
                f"{type(optimizer).__name__} applied them without: "
                "do not override apply or _backend_apply_gradients in it."
            )

    # On the object, not on a subclass: Keras writes an optimizer's class into a saved model.
    optimizer._clip_gradients = reduce_then_clip
    optimizer.apply = apply_and_check
    setattr(optimizer, _ATTRIBUTE, distribution)


def gradient_bytes(optimizer: keras.optimizers.Optimizer) -> int:
    """The bytes of gradients that a rank hands to the allreduce at each update, sparse ones as if dense."""
    total = 0
    for leaf in _leaves(optimizer):
        width = getattr(leaf, _ATTRIBUTE).bytes_per_value
        for variable in leaf._trainable_variables:
            total += variable.value.shape.num_elements() * (width or tf.as_dtype(variable.dtype).size)
    return total


def communication_ms(optimizer: keras.optimizers.Optimizer, repeats: int = 7) -> float:
    """The median time of reducing gradients of this optimizer's shapes and nothing else.

    What a step would wait if nothing of it were hidden. Every rank has to call it.
    """
    leaves = [leaf for leaf in _leaves(optimizer) if leaf._trainable_variables]
    if getattr(leaves[0], _ATTRIBUTE).collectives.size == 1:
        return 0.0
    gradients = [[tf.zeros(v.shape, v.dtype) for v in leaf._trainable_variables] for leaf in leaves]

    @tf.function
    def reduce_all() -> list[tf.Tensor]:
        return [getattr(leaf, _ATTRIBUTE).reduce(each) for leaf, each in zip(leaves, gradients, strict=True)]

    reduce_all()
    times_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        reduce_all()
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(times_ms)


_check_finite_here = keras.optimizers.LossScaleOptimizer.check_finite


def _check_finite_on_every_rank(self: Any, gradients: list[tf.Tensor]) -> tf.Tensor:
    """Keras decides for itself alone, and only the branch for finite gradients updates the variables.

    Rank 0 overflows and skips; rank 1 does not, reduces its gradients, and waits for rank 0 for ever.
    """
    finite = _check_finite_here(self, gradients)
    distribution = getattr(_leaves(self)[0], _ATTRIBUTE, None)
    if distribution is None or distribution.collectives.size == 1:
        return finite
    return distribution.collectives.all_true(finite)


# On the class: model.compile() makes a LossScaleOptimizer of its own around a distributed optimizer.
keras.optimizers.LossScaleOptimizer.check_finite = _check_finite_on_every_rank
