"""``hvd.DistributedOptimizer`` for Keras 3: an optimizer that applies gradients reduced over all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.fields import facts_of
from hvdtrain.config.wording import option
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compressed_reduction import make_reducer
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import GradientReducer
from hvdtrain.distributed.optimizers import leaves, require_plain_optimizer
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.step_sums import StepSums
from hvdtrain.errors import UsageError
from hvdtrain.optim.bounded_updates import update_in_groups
from hvdtrain.optim.ema import moving_average_per_update, with_ramped_momentum
from hvdtrain.optim.epoch_steps import EpochSteps
from hvdtrain.optim.equal_start import EqualStart
from hvdtrain.optim.fused_sgd import fused_update_step
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.keras_calls import call_pipeline
from hvdtrain.optim.loop_replicas import LoopReplicas
from hvdtrain.optim.made_steps import count_steps_of
from hvdtrain.optim.pipeline import GradientPipeline, pipeline_of, pipelines_of, require_pipeline
from hvdtrain.optim.sharded_updates import require_elementwise, shard_state
from hvdtrain.optim.sparse_adagrad import sparse_update_step
from hvdtrain.optim.step_reduction import StepReduction
from hvdtrain.optim.table_gradients import clip_with_tables
from hvdtrain.seams import keras_internals


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
            ``hvdtrain.PowerSGD(rank=4, start_after=100)``, or your own :class:`~hvdtrain.Compression`.
        groups: number of gradient buckets; None: large gradients alone, small ones together.
        sparse_as_dense: reduce ``IndexedSlices`` (embeddings) as dense tensors.
        shard_optimizer: each rank keeps the optimizer's state of 1/N of every variable and updates that part (ZeRO
            stage 1), for optimizers that update each element independently. The updates stay the same.
        collectives: the collectives to reduce with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option breaks its rule, or the optimizer is distributed already.
    """
    options: dict[str, Any] = {"groups": groups, "sparse_as_dense": sparse_as_dense, "shard_optimizer": shard_optimizer}
    config = ReductionConfig(op=op, **options)  # type: ignore[arg-type]
    return distribute(optimizer, config, make_compression(compression), collectives)


def distribute(
    optimizer: keras.optimizers.Optimizer,
    config: ReductionConfig,
    compression: Compression | None = None,
    collectives: Collectives | None = None,
    *,
    local_variables: Callable[[], Sequence[keras.Variable]] = list,
    ema_ramp: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer distributed, and returns it; see :func:`DistributedOptimizer`.

    Args:
        compression: replaces that of ``config``.
        local_variables: returns the variables that each rank trains alone.
        ema_ramp: whether the momentum of the EMA rises to its final value.

    Raises:
        UsageError: as :func:`DistributedOptimizer`.
    """
    require_plain_optimizer(optimizer)
    if is_distributed(optimizer):
        raise UsageError(
            f"an optimizer must be wrapped once. Received: {optimizer.name}, which is distributed already."
        )
    collectives = collectives or runtime.current().collectives
    facts = facts_of(config)
    if compression is not None:
        facts[exclusions.COMPRESSION] = option("compression", compression)
    facts |= exclusions.facts_from(*collectives.conditions)
    if local_variables is not list:
        facts |= exclusions.facts_from(exclusions.LOCAL_LAYERS)
    if any(leaf.global_clipnorm is not None for leaf in leaves(optimizer)):
        facts |= exclusions.facts_from(exclusions.GLOBAL_CLIP_NORM)
    exclusions.require_compatible(facts, known=())
    for leaf in leaves(optimizer):
        reduction = StepReduction(
            config=config,
            collectives=collectives,
            reducer=_make_reducer(leaf, collectives, config, compression),
            compression=compression,
            local_variables=local_variables,
            sums=StepSums(collectives),
        )
        call_pipeline(leaf, make_pipeline(leaf, reduction, ema_ramp=ema_ramp))
        count_steps_of(leaf)
    return optimizer


def make_pipeline(optimizer: Any, reduction: StepReduction, *, ema_ramp: bool) -> GradientPipeline:
    """The pipeline of an optimizer that is not distributed yet.

    Args:
        ema_ramp: whether the momentum of the EMA rises to its final value.
    """
    for improved in (fused_update_step, sparse_update_step):
        optimizer.update_step = improved(optimizer)
    on_parts = None if reduction.sharded is None else shard_state(optimizer, reduction.sharded)
    clip = clip_with_tables(optimizer, reduction.sums, keras_internals.CLIP.of(optimizer))
    average = keras_internals.AVERAGE.of(optimizer) if on_parts is None else on_parts.average
    if optimizer.gradient_accumulation_steps:
        average = moving_average_per_update(optimizer)
    return GradientPipeline(
        start=EqualStart(reduction.collectives),
        replicas=LoopReplicas(reduction.collectives),
        reduce=reduction,
        clip=clip if on_parts is None else on_parts.clip,
        decay=keras_internals.DECAY.of(optimizer) if on_parts is None else on_parts.decay,
        update=update_in_groups(optimizer) if on_parts is None else on_parts.update,
        average=with_ramped_momentum(optimizer, average) if ema_ramp else average,
        steps=EpochSteps(reduction.collectives),
        batches=KeptBatch(),
    )


def _make_reducer(
    leaf: keras.optimizers.Optimizer,
    collectives: Collectives,
    config: ReductionConfig,
    compression: Compression | None,
) -> GradientReducer:
    if not config.shard_optimizer:
        return make_reducer(collectives, config, compression)
    require_elementwise(leaf)
    return ShardedReduction(collectives, config) if collectives.reduces else collectives.gradient_reducer(config)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    local_layers: Sequence[keras.layers.Layer | keras.Variable],
    **options: Any,
) -> keras.optimizers.Optimizer:
    """A :func:`DistributedOptimizer` that averages the gradients of all layers except local ones.

    Each rank trains its own values of local layers, through which only its own samples pass; their gradients are scaled
    to its share of the whole batch. Use it with ``model.fit`` or in your own loop. ``hvdtrain.broadcast`` makes local
    layers equal too: assign other values after it. A checkpoint holds rank 0's values; save those of other ranks there.

    Args:
        local_layers: layers, or single variables; they may be built later.
        options: as for :func:`DistributedOptimizer`.

    Raises:
        UsageError: as :func:`DistributedOptimizer`; or the optimizer clips by the norm of all gradients, which would
            differ between ranks, or an option excludes local layers.
    """
    local = list(local_layers)
    if bad := [each for each in local if not isinstance(each, keras.layers.Layer | keras.Variable)]:
        raise UsageError(f"local_layers must be Keras layers or variables. Received: {bad[0]!r}")

    def local_variables() -> list[keras.Variable]:
        return [v for each in local for v in (each.weights if isinstance(each, keras.layers.Layer) else [each])]

    collectives = options.pop("collectives", None)
    compression = make_compression(options.pop("compression", ReductionConfig.compression))
    config = ReductionConfig(**options)
    return distribute(optimizer, config, compression, collectives, local_variables=local_variables)


def require_distributed(
    optimizer: keras.optimizers.Optimizer, gradient_accumulation_steps: int, collectives: Collectives
) -> None:
    """Makes a trainer's optimizer distributed unless it is.

    Raises:
        UsageError: it accumulates another number of micro-batches than the trainer makes per step.
    """
    for leaf in leaves(optimizer):
        pipeline = pipeline_of(leaf)
        if pipeline is not None and pipeline.reduce.local_variables():
            exclusions.require_compatible(exclusions.facts_from(exclusions.LOCAL_LAYERS, exclusions.TRAINER))
        if (leaf.gradient_accumulation_steps or 1) != gradient_accumulation_steps:
            raise UsageError(
                "gradient_accumulation_steps of the trainer and of its optimizer must be equal. Received: "
                f"{gradient_accumulation_steps} and {leaf.gradient_accumulation_steps}"
            )
    if not is_distributed(optimizer):
        DistributedOptimizer(optimizer, collectives=collectives)


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer reduces its gradients over ranks."""
    return any(pipeline_of(leaf) is not None for leaf in leaves(optimizer))


def gradient_bytes(optimizer: keras.optimizers.Optimizer, updates: int) -> int:
    """The bytes of gradients that a rank passes to the allreduce in its first updates, sparse ones counted as dense;
    those of sharded tables are not reduced."""
    total = 0
    for leaf in leaves(optimizer):
        compression = require_pipeline(leaf).reduce.compression
        num_whole = updates if compression is None else min(updates, compression.start_after)
        for variable in keras_internals.TRAINABLE_VARIABLES.of(leaf):
            if row_shard_of(variable) is not None:
                continue
            dtype = tf.as_dtype(variable.dtype)
            whole = variable.value.shape.num_elements() * max(4, dtype.size)
            spec = tf.TensorSpec(variable.value.shape, dtype)
            compressed = None if compression is None else compression.num_bytes(spec)
            total += num_whole * whole + (updates - num_whole) * (whole if compressed is None else compressed)
    return total


def compression_memories(model: keras.Model) -> list[CompressionMemory]:
    """The compression memories of a model's optimizers, in order."""
    memories = [pipeline.reduce.memory for _, pipeline in pipelines_of(model)]
    return [memory for memory in memories if memory is not None]
