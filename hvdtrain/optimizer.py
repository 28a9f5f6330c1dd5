"""``hvd.DistributedOptimizer``, working on Keras 3."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.collectives import Collectives, Gradient, GradientReducer, Reduced, unreduced
from hvdtrain.errors import UsageError
from hvdtrain.fused_update import fuse_update

_ATTRIBUTE = "_hvdtrain_distribution"

Observer = Callable[[Reduced, Sequence[keras.Variable]], list[Gradient]]
"""Given a step's reduced gradients and their variables, gives back the gradients to apply."""


@dataclasses.dataclass
class _Distribution:
    """What a distributed optimizer carries."""

    collectives: Collectives
    reduce: GradientReducer
    op: str
    compression: str
    groups: int | None
    sparse_as_dense: bool
    observer: Observer | None = None
    applies: tf.Variable | None = None
    """Where there is one, updates are made only while it is true."""
    variables: Sequence[keras.Variable] = ()
    """Those whose gradients are being applied."""


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
        op: ``average`` (equal to one process with the whole batch), ``sum``, or ``adasum``, which
            averages where ranks agree and adds where they are orthogonal (Maleki et al.,
            arXiv:2006.02924; applied to gradients; a power of 2 of ranks, over MPI).
        compression: ``none``, or ``fp16`` to send half the bytes at half precision.
        groups: reduce the gradients in this many messages; None: large ones by themselves, small ones together.
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
    for leaf in leaves(optimizer):
        distribution = _Distribution(collectives, unreduced, op, compression, groups, sparse_as_dense)
        distribution.reduce = _reducer(leaf, distribution)
        _distribute(leaf, distribution)
    return optimizer


def distribute_where_needed(optimizer: keras.optimizers.Optimizer, accumulate: int, collectives: Collectives) -> None:
    """Makes a trainer's optimizer distributed, unless it is.

    Raises:
        UsageError: it does not accumulate as many micro-batches as the trainer makes of a step.
    """
    for leaf in leaves(optimizer):
        if (leaf.gradient_accumulation_steps or 1) != accumulate:
            raise UsageError(
                f"accumulate must equal the optimizer's gradient_accumulation_steps. Received: {accumulate} and "
                f"{leaf.gradient_accumulation_steps}"
            )
    if not is_distributed(optimizer):
        DistributedOptimizer(optimizer, collectives=collectives)


def reduce_among(optimizer: keras.optimizers.Optimizer, collectives: Collectives) -> None:
    """Has a distributed optimizer average among other ranks from now on; what is compiled has to be compiled anew."""
    for leaf in leaves(optimizer):
        distribution = getattr(leaf, _ATTRIBUTE)
        distribution.collectives = collectives
        distribution.reduce = _reducer(leaf, distribution)


def _reducer(leaf: keras.optimizers.Optimizer, distribution: _Distribution) -> GradientReducer:
    return distribution.collectives.gradient_reducer(
        name=leaf.name,
        op=distribution.op,
        compression=distribution.compression,
        groups=distribution.groups,
        sparse_as_dense=distribution.sparse_as_dense,
    )


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """True when the optimizer reduces its gradients across ranks."""
    return any(hasattr(leaf, _ATTRIBUTE) for leaf in leaves(optimizer))


def leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that apply gradients, where the given one may only hand them on."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)  # keras.optimizers.MultiOptimizer, from Keras 3.15 on
    if not isinstance(inner, list):
        return [optimizer]
    if not inner:
        raise UsageError(
            "a MultiOptimizer made from a function has no optimizers before it is built. Call "
            "optimizer.build(model.trainable_variables) before DistributedOptimizer(optimizer)."
        )
    return [leaf for each in inner for leaf in leaves(each)]


def distribution_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """How a distributed optimizer reduces: ``collectives``, ``op``, ``compression``, ``observer``, ``applies``."""
    return getattr(leaves(optimizer)[0], _ATTRIBUTE)


def _distribute(optimizer: Any, distribution: _Distribution) -> None:
    clip, apply = optimizer._clip_gradients, optimizer.apply
    reductions = 0

    def reduce_then_clip(gradients: list[Gradient]) -> list[Gradient]:
        nonlocal reductions
        reductions += 1
        reduced = distribution.reduce(gradients)
        if distribution.observer is None:
            return clip(reduced.gradients)
        return clip(distribution.observer(reduced, distribution.variables))

    def apply_and_check(grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        before = reductions
        known = getattr(optimizer, "_trainable_variables", []) if trainable_variables is None else trainable_variables
        distribution.variables = [v for v, gradient in zip(known, grads, strict=False) if gradient is not None]
        apply(grads, trainable_variables)
        # Unreduced training looks healthy: every rank's loss falls. An optimizer of the user's own may not clip.
        # Where nothing is compiled, a micro-batch that completes no step rightly reduces nothing.
        waits = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
        if len(grads) > 0 and reductions == before and not waits:
            raise UsageError(
                "gradients must pass through Keras' _clip_gradients, where they are averaged. "
                f"{type(optimizer).__name__} applied them without: "
                "do not override apply or _backend_apply_gradients in it."
            )

    # On the object, not on a subclass: Keras writes an optimizer's class into a saved model.
    optimizer._clip_gradients = reduce_then_clip
    optimizer.apply = apply_and_check
    optimizer._apply_weight_decay = _only_while_applying(optimizer._apply_weight_decay, distribution)
    optimizer._backend_update_step = _only_while_applying(optimizer._backend_update_step, distribution)
    average = optimizer._update_model_variables_moving_average
    if optimizer.gradient_accumulation_steps:
        average = _moving_average_per_update(optimizer)
    optimizer._update_model_variables_moving_average = _only_while_applying(average, distribution)
    fuse_update(optimizer)
    setattr(optimizer, _ATTRIBUTE, distribution)


def _only_while_applying(action: Callable[..., None], distribution: _Distribution) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        if distribution.applies is None:
            action(*arguments)
        else:
            keras.ops.cond(distribution.applies.read_value(), lambda: action(*arguments), lambda: None)

    return run


def _moving_average_per_update(optimizer: Any) -> Callable[..., None]:
    """Keras averages the weights at each micro-batch, also where they have not changed: K times too slow a decay."""
    steps = optimizer.gradient_accumulation_steps

    def update(trainable_variables: Sequence[keras.Variable]) -> None:
        if not optimizer.use_ema:
            return
        micro_batches = tf.convert_to_tensor(optimizer._iterations) + 1
        # The first update starts the average.
        momentum = tf.where(micro_batches > steps, tf.cast(optimizer.ema_momentum, tf.float64), 0.0)

        def average_all() -> None:
            for variable, average in zip(trainable_variables, optimizer._model_variables_moving_average, strict=True):
                if average is not None:
                    kept = tf.cast(momentum, average.dtype)
                    average.assign(kept * average + (1 - kept) * variable)

        keras.ops.cond(micro_batches % steps == 0, average_all, lambda: None)

    return update


def gradient_bytes(optimizer: keras.optimizers.Optimizer) -> int:
    """The bytes of gradients that a rank hands to the allreduce at each update, sparse ones as if dense."""
    total = 0
    for leaf in leaves(optimizer):
        on_wire = 2 if getattr(leaf, _ATTRIBUTE).compression == "fp16" else None
        for variable in leaf._trainable_variables:
            total += variable.value.shape.num_elements() * (on_wire or tf.as_dtype(variable.dtype).size)
    return total


_check_finite_here = keras.optimizers.LossScaleOptimizer.check_finite


def _check_finite_on_every_rank(self: Any, gradients: list[tf.Tensor]) -> tf.Tensor:
    """Keras decides for itself alone, and only the branch for finite gradients updates the variables.

    Rank 0 overflows and skips; rank 1 does not, reduces its gradients, and waits for rank 0 for ever.
    """
    finite = _check_finite_here(self, gradients)
    distribution = getattr(leaves(self)[0], _ATTRIBUTE, None)
    if distribution is None or distribution.collectives.size == 1:
        return finite
    return distribution.collectives.all_true(finite)


# On the class: model.compile() makes a LossScaleOptimizer of its own around a distributed optimizer.
keras.optimizers.LossScaleOptimizer.check_finite = _check_finite_on_every_rank
