"""Where Keras calls hvdtrain. From top to bottom, this is what happens in the training step of a micro-batch:

1. ``BatchNormalization._moments``: synchronized layers compute mean and variance over the samples of all ranks.
2. ``Loss.__call__``, within ``train_step``: losses that divide by something other than the number of samples are
   combined over ranks. ``_compute_loss``, of Keras' own ``train_step``: their sum must be one number.
3. ``_aggregate_additional_loss``: with ``op="sum"`` each rank adds its share of the regularization losses.
4. ``scale_loss``: the stage ``weigh``. The backward pass follows.
5. ``apply`` of the optimizer: the stage ``mark``. For a ``train_step`` that uses gradients before, the stages ``mark``
   and ``reduce`` come where the tape returns them; for an optimizer that overrides ``apply``, ``reduce`` comes here.
6. ``LossScaleOptimizer.check_finite``: all ranks agree on whether a gradient has overflowed.
7. ``_clip_gradients``: the stages ``start`` to ``clip``.
8. ``_apply_weight_decay``, ``_backend_update_step``, ``_update_model_variables_moving_average``: the stages ``decay``,
   ``update`` and ``average``.

The stages are those of the :class:`~hvdtrain.optim.pipeline.GradientPipeline` that the optimizer has when a step is
traced. Methods of an optimizer are replaced on the object, not in a subclass, because Keras writes an optimizer's class
into a saved model. Steps 2, 3 and 6 are replaced in Keras' classes, and do nothing unless the model's optimizer is
distributed. Metrics and losses of every model create their variables outside of the step, in its first trace.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.exclusions import Option
from hvdtrain.distributed import runtime
from hvdtrain.distributed.batch_norm import moments_over_ranks
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient
from hvdtrain.distributed.optimizers import is_accumulator, is_horovods_own, leaves, optimizers_of
from hvdtrain.distributed.program_operations import noted_operations
from hvdtrain.distributed.row_lookup import with_unknown_ids
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.snapshot import path_of, resource_of
from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.distributed.untuned_datasets import without_autotuning
from hvdtrain.distributed.weighted_gradients import GradientWeight
from hvdtrain.errors import UsageError
from hvdtrain.optim import global_loss, tape_gradients
from hvdtrain.optim.batch_weights import batch_weight, weighted
from hvdtrain.optim.data_length import note_length
from hvdtrain.optim.ema import after_last_micro_batch
from hvdtrain.optim.equal_steps import with_equal_ranks
from hvdtrain.optim.evaluated_values import with_values_over_ranks
from hvdtrain.optim.lone_training import run_guarded
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.optim.own_loops import compares_replicas, note_lone_update, note_reduction
from hvdtrain.optim.pipeline import (
    Applied,
    GradientPipeline,
    are_of_weighed_losses,
    current_scope,
    in_scope,
    keep_pipeline,
    note_weighed_loss,
    pipeline_of,
    pipelines_of,
    reduce_check_and_clip,
    require_pipeline,
    unless_skipped,
    when_checked,
)
from hvdtrain.optim.short_steps import with_line_about_short_steps
from hvdtrain.optim.step_reduction import already_reduced
from hvdtrain.optim.table_gradients import are_tables, require_no_norms_of_tables, require_usable_with_tables
from hvdtrain.seams import keras_internals

# Step 1: the forward pass.


def synchronize_batch_normalization(
    model: keras.Model,
    *,
    all_layers: bool = True,
    collectives: Collectives | None = None,
    sample_weight: Callable[[], tf.Tensor | None] = lambda: None,
    gradient_weight: GradientWeight = global_loss.gradient_weight_of_step,
) -> int:
    """Makes BatchNormalization layers compute mean and variance over the samples of all ranks.

    Outputs and gradients are then those of one process with the whole batch. Keras' own ``synchronized=True`` uses
    ``tf.distribute`` and reduces nothing between Horovod's ranks. One collective per layer forward, one backward.

    Args:
        model: a built model; its layers are changed in place, and a saved model shows only ``synchronized=True``.
        all_layers: False: only layers made with ``synchronized=True``.
        collectives: the collectives to reduce with (default: those of ``hvdtrain.init()``).
        sample_weight: while a step is traced, the weight of this rank's samples; 0 leaves them out.
        gradient_weight: the weight by which this rank's gradients are multiplied later, if its loss is not (default:
            that of the step that is traced).

    Returns:
        The number of synchronized layers.
    """
    collectives = collectives or runtime.current().collectives
    layers = [
        layer
        for layer in keras_internals.FLATTEN_LAYERS.of(model)()
        if isinstance(layer, keras.layers.BatchNormalization) and (all_layers or layer.synchronized)
    ]
    for i, layer in enumerate(layers):
        layer.synchronized = True
        if collectives.reduces:
            keras_internals.MOMENTS.set(
                layer, moments_over_ranks(layer, f"hvdtrain_batchnorm_{i}", collectives, sample_weight, gradient_weight)
            )
    return len(layers)


# Steps 2 and 3: losses that are not a mean over samples.

_compute_loss_here = keras.losses.Loss.__call__
_make_train_function_here = keras.Model.make_train_function
_aggregate_additional_loss_here = keras_internals.ADDITIONAL_LOSS.of(keras.Model)
_compute_total_loss_here = keras_internals.COMPUTE_LOSS.of(keras.Model)


def _compute_loss_over_ranks(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
    return global_loss.loss_over_ranks(self, functools.partial(_compute_loss_here, self), y_true, y_pred, sample_weight)


def _make_train_function_over_ranks(self: Any, force: bool = False) -> None:
    """For ``model.fit`` and ``model.train_on_batch``: Keras compiles a ``train_step`` whose losses are combined.

    Without XLA, which Keras chooses on a GPU: it cannot compile Horovod's operations.
    """
    jit_compile = self.jit_compile
    tape_gradients.forget(self)
    all_collectives = [pipeline.reduce.collectives for _, pipeline in pipelines_of(self)]
    reduces = any(each.reduces for each in all_collectives)
    if reduces:
        synchronize_batch_normalization(self, all_layers=False, collectives=all_collectives[0])
    restore = replace_method(self, "train_step", functools.partial(_run_in_fit, self, self.train_step))
    keras_internals.JIT_COMPILE.set(self, jit_compile and not reduces)
    try:
        _make_train_function_here(self, force)
    finally:
        keras_internals.JIT_COMPILE.set(self, jit_compile)
        restore()


def _run_in_fit(model: Any, train_step: Callable[[Any], Any], data: Any) -> Any:
    pipelines = pipelines_of(model)
    if not pipelines:
        return run_guarded(model, functools.partial(run_train_step, model, train_step), data)
    _, first = pipelines[0]
    first.batches.observe(data)
    return run_weighted_train_step(model, train_step, data)


def run_weighted_train_step(
    model: Any,
    train_step: Callable[[Any], Any],
    data: Any,
    *,
    is_update: bool = False,
    is_weighted_later: bool = False,
) -> Any:
    """Runs the ``train_step`` of a model that is distributed; each rank counts by its number of samples.

    Args:
        is_update: whether each rank's batches of an update have the same number of samples.
        is_weighted_later: whether the caller multiplies loss and gradients by the weight.
    """
    pipelines = pipelines_of(model)
    _, first = pipelines[0]
    weight = batch_weight(data, pipelines, is_of_update=is_update) if first.reduce.collectives.reduces else None
    if weight is None:
        return run_train_step(model, train_step, data)
    if is_weighted_later:
        value = weight.value
        return run_train_step(model, train_step, data, sample_weight=lambda: value, gradient_weight=lambda: value)
    for optimizer in optimizers_of(model):
        if pipeline_of(optimizer) is not None:
            call_weigh_and_mark(optimizer)
    with weighted(pipelines, weight):
        return run_train_step(
            model, train_step, data, sample_weight=lambda: weight.value, gradient_weight=weight.of_gradients
        )


def _add_share_of_loss(self: Any, loss: tf.Tensor) -> tf.Tensor:
    """The sum over ranks of a regularization loss is the loss times their number."""
    total = _aggregate_additional_loss_here(self, loss)
    scope = global_loss.loss_scope()
    if scope is None or not scope.sums_gradients:
        return total
    return total / tf.cast(scope.collectives.num_ranks(), total.dtype)


def _compute_one_number(self: Any, *arguments: Any, **named: Any) -> tf.Tensor | None:
    loss = _compute_total_loss_here(self, *arguments, **named)
    if loss is not None and global_loss.loss_scope() is not None:
        global_loss.require_one_number(loss)
    return loss


# In the first step: variables.


def _built_outside_of_step(build: Callable[..., None]) -> Callable[..., None]:
    """What is built in the first step creates its variables outside of the step, which is then traced once."""

    @functools.wraps(build)
    def build_outside_of_step(*arguments: Any, **named: Any) -> None:
        with outside_of_step():
            build(*arguments, **named)

    return build_outside_of_step


for _built_in_step in (keras_internals.METRICS_OF_COMPILE.value(), keras_internals.LOSSES_OF_COMPILE.value()):
    _built_in_step.build = _built_outside_of_step(_built_in_step.build)


# Before a step: its batch.

_epoch_iterator = keras_internals.EPOCH_ITERATOR.value()
_dataset_of_epoch_here = keras_internals.EPOCH_DATASET.of(_epoch_iterator)
_make_epoch_iterator = _epoch_iterator.__init__


@functools.wraps(_make_epoch_iterator)
def _make_and_note_length(self: Any, *arguments: Any, **named: Any) -> None:
    _make_epoch_iterator(self, *arguments, **named)
    note_length(self.data_adapter.num_batches)


def _untuned_dataset_of_epoch(self: Any) -> Any:
    dataset = _dataset_of_epoch_here(self)
    # A strategy of tf.distribute has its own kind of datasets.
    return without_autotuning(dataset) if isinstance(dataset, tf.data.Dataset) else dataset


keras_internals.EPOCH_DATASET.set(_epoch_iterator, _untuned_dataset_of_epoch)
_epoch_iterator.__init__ = _make_and_note_length


def make_test_function(model: Any, run: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Compiles a model's ``test_step``, run by a function that receives it and its data."""
    restore = replace_method(model, "test_step", functools.partial(run, model.test_step))
    try:
        model.make_test_function(force=True)
    finally:
        restore()


keras.losses.Loss.__call__ = _compute_loss_over_ranks
keras.Model.make_train_function = _make_train_function_over_ranks
keras.Model.fit = with_line_about_short_steps(
    with_equal_ranks(with_unknown_ids(global_loss.with_loss_errors(keras.Model.fit)))
)
keras.Model.evaluate = with_values_over_ranks(with_unknown_ids(keras.Model.evaluate))
keras.Model.predict = with_unknown_ids(keras.Model.predict)
keras_internals.ADDITIONAL_LOSS.set(keras.Model, _add_share_of_loss)
keras_internals.COMPUTE_LOSS.set(keras.Model, _compute_one_number)


def run_train_step(
    model: Any,
    train_step: Callable[[Any], Any],
    data: Any,
    *,
    sample_weight: Callable[[], tf.Tensor | None] = lambda: None,
    gradient_weight: GradientWeight = lambda: None,
    excluded_by: Sequence[Option] = (),
) -> Any:
    """Runs a model's ``train_step``; its losses are combined over the ranks that reduce its gradients.

    Args:
        sample_weight: returns the weight by which the loss is multiplied; None if all ranks have the same.
        gradient_weight: returns the weight by which the gradients are multiplied, if the loss is not.
        excluded_by: the options that keep ranks from communicating in the forward pass.
    """
    pipeline = next((pipeline for _, pipeline in pipelines_of(model)), None)
    if pipeline is None:
        with global_loss.losses_over_ranks(global_loss.LossScope(SingleProcessCollectives())):
            return train_step(data)
    if pipeline.steps.is_active:
        data = pipeline.steps.count(data)
    config = pipeline.reduce.config
    if not config.is_linear:
        return train_step(data)
    scope = global_loss.LossScope(
        pipeline.reduce.collectives,
        sample_weight,
        gradient_weight,
        sums_gradients=config.op == "sum",
        excluded_by=excluded_by,
    )
    with (
        tape_gradients.reduced_if_used(model, train_step, data, excluded_by),
        global_loss.losses_over_ranks(scope),
        noted_operations() as operations,
    ):
        returned = train_step(data)
    if pipeline.start is not None and not tf.executing_eagerly():
        pipeline.start.require_same_operations(operations, pipeline.reduce.collectives)
    return returned


_apply_here = keras.optimizers.Optimizer.apply


def _apply_if_distributed(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """Refuses an optimizer that would train every rank alone: Horovod's own, or one that was not wrapped."""
    if is_horovods_own(self):
        raise UsageError(
            "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls the methods that it "
            f"overrides. Received: {self.name}, wrapped by it. Use hvdtrain.DistributedOptimizer."
        )
    if global_loss.loss_scope() is not None and pipeline_of(self) is None:
        raise UsageError(
            "each optimizer that a train_step applies must be distributed. Received: "
            f"{self.name}, which is not. Wrap it in DistributedOptimizer, and keep it as an attribute of the model."
        )
    if pipeline_of(self) is None:
        note_lone_update(self)
        if trainable_variables is not None:
            require_no_norms_of_tables(self, trainable_variables)
    _apply_here(self, grads, trainable_variables)


keras.optimizers.Optimizer.apply = _apply_if_distributed


@contextlib.contextmanager
def finite_losses(model: Any) -> Iterator[None]:
    """While a step is traced that may be skipped: its loss is left out of the mean of losses if it is not finite."""
    tracker = keras_internals.LOSS_TRACKER.of(model)
    update_state = tracker.update_state

    def update_if_finite(loss: tf.Tensor, sample_weight: Any = None) -> Any:
        finite = tf.math.is_finite(loss)
        weight = tf.cast(1 if sample_weight is None else sample_weight, loss.dtype)
        return update_state(tf.where(finite, loss, 0), sample_weight=tf.where(finite, weight, 0))

    restore = replace_method(tracker, "update_state", update_if_finite)
    try:
        yield
    finally:
        restore()


def observe_updates(metric: keras.Metric, observe: Callable[..., None]) -> None:
    """Calls a function after each update of a metric, with Keras' update and what it was called with."""
    update_state = metric.update_state

    def update_and_observe(*arguments: Any, **named: Any) -> Any:
        result = update_state(*arguments, **named)
        observe(update_state, *arguments, **named)
        return result

    metric.update_state = update_and_observe


@contextlib.contextmanager
def recorded_results(model: keras.Model) -> Iterator[list[tuple[keras.Metric, str | None, Any]]]:
    """Collects the results of the model's metrics that are computed in the block; several results of a metric by
    name."""
    recorded: list[tuple[keras.Metric, str | None, Any]] = []

    def recording(metric: keras.Metric) -> Callable[[], Any]:
        compute = metric.result

        def result() -> Any:
            value = compute()
            parts = value.items() if isinstance(value, dict) else [(None, value)]
            recorded.extend((metric, name, part) for name, part in parts)
            return value

        return result

    restores = [replace_method(metric, "result", recording(metric)) for metric in model.metrics]
    try:
        yield recorded
    finally:
        for restore in restores:
            restore()


# Steps 4 and 5: the loss and the gradients of this rank.


def call_weigh_and_mark(optimizer: Any) -> None:
    """Makes an optimizer that ``train_step`` applies call these stages; it may be a wrapper. A second call does
    nothing."""
    if "hvdtrain_marks" in vars(optimizer):
        return
    vars(optimizer)["hvdtrain_marks"] = True
    scale_loss, apply = optimizer.scale_loss, optimizer.apply
    was_weighed = False

    def weigh_and_scale(loss: tf.Tensor) -> tf.Tensor:
        nonlocal was_weighed
        was_weighed = True
        scaled = scale_loss(require_pipeline(optimizer).weigh(loss))
        note_weighed_loss(scaled)
        return scaled

    def mark_and_apply(grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        nonlocal was_weighed
        pipeline = require_pipeline(optimizer)
        if pipeline.divert is not None:
            pipeline.divert(grads, trainable_variables)
            return
        # By this optimizer or, where several apply the gradients of one loss, by another.
        were_weighed = was_weighed or are_of_weighed_losses(grads)
        marked = _marked(pipeline, grads, _known_variables(optimizer, trainable_variables), were_weighed)
        was_weighed = False
        apply(marked, trainable_variables)

    optimizer.scale_loss = weigh_and_scale
    optimizer.apply = mark_and_apply


def _known_variables(optimizer: Any, trainable_variables: Any) -> Sequence[keras.Variable]:
    """The variables whose gradients are applied: those that were passed, or all that the optimizer trains."""
    if trainable_variables is not None:
        return list(trainable_variables)
    return [variable for leaf in leaves(optimizer) for variable in keras_internals.TRAINABLE_VARIABLES.of(leaf)]


def _marked(
    pipeline: GradientPipeline,
    gradients: Sequence[Gradient | None],
    variables: Sequence[keras.Variable],
    was_weighed: bool,
) -> list[Gradient | None]:
    """The stage ``mark``, for the gradients that are this rank's own; those of sharded tables are of all ranks."""
    is_table = are_tables(variables)
    if not any(is_table):
        return list(pipeline.mark(gradients, was_weighed))
    own = [None if table else each for each, table in zip(gradients, is_table, strict=True)]
    marked = pipeline.mark(own, was_weighed)
    return [each if table else mine for each, mine, table in zip(gradients, marked, is_table, strict=True)]


# Step 6: all ranks skip a step together.

_check_finite_here = keras.optimizers.LossScaleOptimizer.check_finite


def _check_finite_on_every_rank(self: Any, gradients: list[tf.Tensor]) -> tf.Tensor:
    """Keras decides on each rank alone, and only the branch for finite gradients updates the variables.

    Without this: rank 0 overflows and skips; rank 1 does not, reduces its gradients, and waits for rank 0 forever.
    """
    finite = _check_finite_here(self, gradients)
    pipeline = pipeline_of(self)
    if pipeline is None or pipeline.reduce.is_done or not pipeline.reduce.collectives.reduces:
        return finite
    return pipeline.reduce.collectives.all_true(finite)


# On the class: model.compile() wraps a distributed optimizer in its own LossScaleOptimizer.
keras.optimizers.LossScaleOptimizer.check_finite = _check_finite_on_every_rank


# Steps 7 and 8: the reduction and the update.


def call_pipeline(optimizer: Any, pipeline: GradientPipeline) -> None:
    """Makes an optimizer that applies gradients call the stages from ``start`` on; the pipeline becomes its own."""
    apply = optimizer.apply
    overrides_apply = type(optimizer).apply is not keras.optimizers.Optimizer.apply
    applied: list[Applied] = []

    # A loop of one's own calls it in a tf.function, whose AutoGraph would convert all of this, and warn that it cannot.
    @tf.autograph.experimental.do_not_convert
    def apply_and_require_reduction(grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        known = (
            keras_internals.TRAINABLE_VARIABLES.of(optimizer) if trainable_variables is None else trainable_variables
        )
        found = [v for v, gradient in zip(known, grads, strict=False) if gradient is not None]
        variables = _without_overwritten(found, require_pipeline(optimizer))
        require_usable_with_tables(optimizer, variables, require_pipeline(optimizer).reduce)
        applied.append(Applied(optimizer, variables))
        if (scope := current_scope()) is not None:
            scope.applied.append(applied[-1])
        first = _reduced_first(optimizer, grads, known) if overrides_apply else contextlib.nullcontext(grads)
        try:
            with first as gradients, _overwriting_once_per_step(optimizer):
                apply(gradients, trainable_variables)
        finally:
            is_reduced = applied.pop().is_reduced
        # Training without a reduction looks healthy: every rank's loss falls. A user's own optimizer may not clip.
        # In eager mode, a micro-batch that completes no step rightly reduces nothing.
        waits = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
        if len(grads) > 0 and not is_reduced and not waits:
            raise UsageError(
                "gradients must pass through Keras' _clip_gradients, where they are reduced. Received: "
                f"{type(optimizer).__name__}, which applied them without it. Do not override apply or "
                "_backend_apply_gradients in it."
            )

    def reduce_and_clip(gradients: list[Gradient]) -> list[Gradient]:
        pipeline, own = require_pipeline(optimizer), applied[-1]
        if pipeline.start is not None:
            note_reduction(pipeline.reduce.config, pipeline.reduce.collectives)
            known = [id(variable) for variable in keras_internals.TRAINABLE_VARIABLES.of(optimizer)]
            pipeline.start.require_same_gradients(
                [known.index(id(variable)) for variable in own.variables], own.variables, pipeline.reduce.collectives
            )
            is_local = pipeline.reduce.are_local(own.variables)
            weights = [variable for variable, local in zip(own.variables, is_local, strict=True) if not local]
            own_state = [each for each in whole_variables(optimizer.variables) if not is_accumulator(path_of(each))]
            pipeline.start.require(
                optimizer, pipeline.reduce.config, [*weights, *own_state], pipeline.reduce.collectives
            )
            if compares_replicas(pipeline.reduce.collectives):
                # First the cause, such as a learning rate.
                numbers = [each for each in own_state if each.shape == ()]
                compared = [*numbers, *whole_variables(weights)]
                pipeline.replicas.compare_now_and_then(tf.convert_to_tensor(optimizer.iterations), compared)
        return reduce_check_and_clip(pipeline, own, gradients)

    def decay(variables: Sequence[keras.Variable]) -> None:
        pipeline = require_pipeline(optimizer)
        when_checked(pipeline, applied[-1], lambda: pipeline.decay(variables))

    def update(gradients: Sequence[Gradient], variables: Sequence[keras.Variable], learning_rate: Any) -> None:
        pipeline = require_pipeline(optimizer)
        when_checked(pipeline, applied[-1], lambda: pipeline.update(gradients, variables, learning_rate))

    def average(variables: Sequence[keras.Variable]) -> None:
        pipeline = require_pipeline(optimizer)
        unless_skipped(pipeline, lambda: pipeline.average(variables))

    build_here, build_outside_of_step = optimizer.build, _built_outside_of_step(optimizer.build)

    def build(variables: Sequence[keras.Variable]) -> None:
        with tf.init_scope():
            # A model that the first batch builds has no values yet, which some optimizers copy.
            have_values = all(resource_of(variable).is_initialized() for variable in variables)
        (build_outside_of_step if have_values else build_here)(variables)

    keep_pipeline(optimizer, pipeline)
    optimizer.build = build
    optimizer.apply = apply_and_require_reduction
    keras_internals.CLIP.set(optimizer, reduce_and_clip)
    keras_internals.DECAY.set(optimizer, decay)
    keras_internals.UPDATE.set(optimizer, update)
    keras_internals.AVERAGE.set(optimizer, average)


def _without_overwritten(variables: Sequence[keras.Variable], pipeline: GradientPipeline) -> Sequence[keras.Variable]:
    """The variables whose gradients Keras does not assign to them, as it does with the scales of float8."""
    others = [variable for variable in variables if not getattr(variable, "overwrite_with_gradient", False)]
    if len(others) < len(variables) and pipeline.reduce.collectives.reduces:
        raise UsageError(
            "float8 is not supported on several ranks: its scales are maxima over a batch, and each rank would have "
            f"its own. Received: {len(variables) - len(others)} such variables. Train in bfloat16 "
            "(keras.config.set_dtype_policy('mixed_bfloat16')), or on one rank."
        )
    return others


@contextlib.contextmanager
def _reduced_first(
    optimizer: Any, gradients: Sequence[Gradient | None], variables: Sequence[keras.Variable]
) -> Iterator[list[Gradient | None]]:
    """Reduces gradients for an optimizer that overrides ``apply``, and so may change them before Keras' stages."""
    pipeline = require_pipeline(optimizer)
    result = list(gradients)
    if pipeline.reduce.is_done or not pipeline.reduce.collectives.reduces:
        yield result
        return
    found = [i for i, each in enumerate(result) if each is not None]
    reduced = pipeline.reduce([variables[i] for i in found], [gradients[i] for i in found])
    for i, each in zip(found, reduced.gradients, strict=True):
        result[i] = each
    with in_scope([(optimizer, dataclasses.replace(pipeline, reduce=already_reduced(pipeline.reduce)))]):
        yield result


@contextlib.contextmanager
def _overwriting_once_per_step(optimizer: Any) -> Iterator[None]:
    """In the block the EMA overwrites the weights only after a step's last micro-batch; in Keras, after each one."""
    if not optimizer.gradient_accumulation_steps:
        yield
        return
    overwrite = keras_internals.OVERWRITE
    restore = replace_method(optimizer, overwrite.name, after_last_micro_batch(optimizer, overwrite.of(optimizer)))
    try:
        yield
    finally:
        restore()
