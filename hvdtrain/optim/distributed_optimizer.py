"""``hvd.DistributedOptimizer`` for Keras 3: an optimizer that applies gradients reduced over all ranks."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compressed_reduction import CompressedReducer, make_reducer
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import GradientReducer
from hvdtrain.distributed.optimizers import is_horovods_own, leaves
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.errors import UsageError
from hvdtrain.optim.equal_start import EqualStart
from hvdtrain.optim.hook_state import GradientHooks, gradient_hooks, model_hooks
from hvdtrain.optim.hooks import install_gradient_hooks
from hvdtrain.optim.sharded_updates import require_elementwise


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    op: str = ReductionConfig.op,
    compression: str | Compression = ReductionConfig.compression,
    groups: int | None = ReductionConfig.groups,
    sparse_as_dense: bool = ReductionConfig.sparse_as_dense,
    shard_optimizer: bool = ReductionConfig.shard_optimizer,
    collectives: Collectives | None = None,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer apply gradients that are averaged over all ranks, and returns it.

    The gradients are reduced by Horovod right before Keras clips them, so that clipping, weight decay, EMA and the
    update all use the averaged gradient; with ``gradient_accumulation_steps`` there is one reduction for all
    micro-batches. Under a ``LossScaleOptimizer`` (also the one that ``compile`` adds for ``mixed_float16``) all ranks
    skip a step together if a gradient of any of them overflows.

    The optimizer keeps its class and its state, so that a saved model holds no trace of Horovod; wrap the optimizer
    again after loading one.

    Args:
        optimizer: any Keras optimizer, ``LossScaleOptimizer`` and ``MultiOptimizer`` included.
        op: ``average`` (equal to one process with the whole batch), ``sum``, or ``adasum``, which averages gradients
            that agree and adds those that are orthogonal (Maleki et al., arXiv:2006.02924; applied to gradients; the
            number of ranks must be a power of 2; MPI only).
        compression: ``none``, ``fp16`` (half precision: half the bytes) or ``powersgd:RANK`` (matrices of this rank,
            Vogels et al., arXiv:1905.13727), with error feedback; or an object: ``hvdtrain.FP16()``,
            ``hvdtrain.PowerSGD(rank=4, start_after=100)``, or a :class:`~hvdtrain.Compression` of your own.
        groups: number of gradient buckets; None: large gradients alone, small ones together.
        sparse_as_dense: reduce ``IndexedSlices`` (embeddings) as dense tensors.
        shard_optimizer: each rank keeps the optimizer's state of 1/N of every variable and updates that part (ZeRO
            stage 1), for optimizers that update each element by itself. The updates stay the same.
        collectives: the collectives to reduce with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option breaks its rule, or the optimizer is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer) or is_horovods_own(optimizer):
        raise UsageError(
            "optimizer must be an optimizer of Keras 3 that Horovod has not wrapped. "
            f"Received: {optimizer!r}. Pass the plain one."
        )
    if is_distributed(optimizer):
        raise UsageError(
            f"an optimizer must be wrapped once. Received: {optimizer.name}, which is distributed already."
        )
    compressing = make_compression(compression)
    options: dict[str, Any] = {"groups": groups, "sparse_as_dense": sparse_as_dense, "shard_optimizer": shard_optimizer}
    reduction = ReductionConfig(op=op, **options)  # type: ignore[arg-type]
    collectives = collectives or runtime.current().collectives
    for leaf in leaves(optimizer):
        reducer = _make_reducer(leaf, collectives, reduction, compressing)
        hooks = GradientHooks(reduction, collectives, reducer, EqualStart(collectives), compression=compressing)
        install_gradient_hooks(leaf, hooks)
    return optimizer


def _make_reducer(
    leaf: keras.optimizers.Optimizer,
    collectives: Collectives,
    config: ReductionConfig,
    compression: Compression | None,
) -> GradientReducer:
    if not config.shard_optimizer:
        return make_reducer(collectives, config, compression)
    if compression is not None:
        raise UsageError(
            f"a sharded optimizer sends whole gradients. Received: compression {compression}. Leave one of them out."
        )
    require_elementwise(leaf)
    if collectives.may_change:
        raise UsageError(
            "elastic jobs do not support --shard-optimizer: a lost rank takes its part of the state with it. Leave it "
            "out, or use launch/run --restarts."
        )
    return ShardedReduction(collectives, config) if collectives.reduces else collectives.gradient_reducer(config)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: Sequence[keras.layers.Layer | keras.Variable],
    **options: Any,
) -> keras.optimizers.Optimizer:
    """A :func:`DistributedOptimizer` that averages the gradients of all layers except local ones.

    Each rank trains its own values of local layers, through which only its own samples pass, by their share of the
    gradient over the whole batch. Use it with ``model.fit`` or in a loop of your own. ``hvdtrain.broadcast`` makes
    local layers equal too: assign other values after it. A checkpoint holds rank 0's values; save those of other ranks
    there.

    Args:
        local_layers: layers, or single variables; they may be built later.
        options: as for :func:`DistributedOptimizer`.

    Raises:
        UsageError: as :func:`DistributedOptimizer`; or the optimizer clips by the norm of all gradients, which would
            differ between ranks, or has ``op="adasum"``.
    """
    local = list(local_layers)
    if bad := [each for each in local if not isinstance(each, keras.layers.Layer | keras.Variable)]:
        raise UsageError(f"local_layers must be Keras layers or variables. Received: {bad[0]!r}")
    for leaf in leaves(optimizer) if isinstance(optimizer, keras.optimizers.Optimizer) else []:
        if leaf.global_clipnorm is not None:
            raise UsageError(
                "with local_layers, the norm of all gradients differs between ranks, and so would the variables that "
                f"they share. Received: global_clipnorm={leaf.global_clipnorm}. Use clipnorm or clipvalue."
            )
    if options.get("op") == "adasum":
        raise UsageError("op must be average or sum with local_layers. Received: adasum")
    if options.get("shard_optimizer"):
        raise UsageError("with local_layers, shard_optimizer must be False: each rank updates its own. Received: True")

    def local_variables() -> list[keras.Variable]:
        return [v for each in local for v in (each.weights if isinstance(each, keras.layers.Layer) else [each])]

    optimizer = DistributedOptimizer(optimizer, **options)
    for leaf in leaves(optimizer):
        require_hooks(leaf).local_variables = local_variables
    return optimizer


def require_distributed(
    optimizer: keras.optimizers.Optimizer, gradient_accumulation_steps: int, collectives: Collectives
) -> None:
    """Makes a trainer's optimizer distributed unless it is.

    Raises:
        UsageError: it accumulates another number of micro-batches than the trainer makes per step.
    """
    for leaf in leaves(optimizer):
        hooks = gradient_hooks(leaf)
        if hooks is not None and hooks.local_variables():
            raise UsageError(
                "a trainer keeps all replicas equal. Received: an optimizer with local_layers. Use model.fit or a loop "
                "of your own."
            )
        if (leaf.gradient_accumulation_steps or 1) != gradient_accumulation_steps:
            raise UsageError(
                "gradient_accumulation_steps of the trainer and of its optimizer must be equal. Received: "
                f"{gradient_accumulation_steps} and {leaf.gradient_accumulation_steps}"
            )
    if not is_distributed(optimizer):
        DistributedOptimizer(optimizer, collectives=collectives)


def set_collectives(optimizer: keras.optimizers.Optimizer, collectives: Collectives) -> None:
    """Makes a distributed optimizer average over other ranks from now on; compiled functions must be compiled anew."""
    for leaf in leaves(optimizer):
        hooks = require_hooks(leaf)
        require_whole_state(hooks, "local SGD, in which each rank makes updates of its own")
        before, hooks.collectives = hooks.reduce, collectives
        hooks.reduce = make_reducer(collectives, hooks.reduction, hooks.compression)
        if isinstance(before, CompressedReducer) and isinstance(hooks.reduce, CompressedReducer):
            hooks.reduce.memory.continue_from(before.memory)


def require_whole_state(hooks: GradientHooks, reason: str) -> None:
    """Refuses a sharded optimizer for what needs all of its state on every rank.

    Raises:
        UsageError: the optimizer is sharded.
    """
    if hooks.sharded is not None:
        raise UsageError(f"--shard-optimizer (shard_optimizer=True) excludes {reason}. Leave one of them out.")


def set_ema_ramp(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the momentum of a distributed optimizer's EMA rise to its final value."""
    for leaf in leaves(optimizer):
        require_hooks(leaf).ema_ramp = True


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer reduces its gradients over ranks."""
    return any(gradient_hooks(leaf) is not None for leaf in leaves(optimizer))


def require_hooks(optimizer: keras.optimizers.Optimizer) -> GradientHooks:
    """The hooks of an optimizer that is known to be distributed."""
    hooks = gradient_hooks(optimizer)
    assert hooks is not None, optimizer
    return hooks


def gradient_bytes(optimizer: keras.optimizers.Optimizer, updates: int) -> int:
    """The bytes of gradients that a rank passes to the allreduce in its first updates, sparse ones counted as dense."""
    total = 0
    for leaf in leaves(optimizer):
        compression = require_hooks(leaf).compression
        num_whole = updates if compression is None else min(updates, compression.start_after)
        for variable in leaf._trainable_variables:
            dtype = tf.as_dtype(variable.dtype)
            whole = variable.value.shape.num_elements() * max(4, dtype.size)
            spec = tf.TensorSpec(variable.value.shape, dtype)
            compressed = None if compression is None else compression.num_bytes(spec)
            total += num_whole * whole + (updates - num_whole) * (whole if compressed is None else compressed)
    return total


def compression_memories(model: keras.Model) -> list[CompressionMemory]:
    """What the compressed reductions of a model's optimizers keep, in order."""
    reducers = [hooks.reduce for hooks in model_hooks(model)]
    return [each.memory for each in reducers if isinstance(each, CompressedReducer)]
