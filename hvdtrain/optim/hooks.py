"""Where hvdtrain enters Keras. Read from top to bottom, this is what happens in the training step of a micro-batch:

1. ``BatchNormalization._moments``: synchronized layers compute mean and variance over the samples of all ranks.
2. ``Loss.__call__``, within ``train_step``: losses that divide by another count than that of the samples are combined
   over ranks. ``_compute_loss``, of Keras' own ``train_step``: their sum must be one number.
3. ``_aggregate_additional_loss``: with ``op="sum"`` each rank adds its share of the regularization losses.
4. ``_loss_tracker.update_state``: the loss of a step that may be skipped is left out of the mean if it is not finite.
5. ``scale_loss``: the loss is weighted, so that the mean over ranks is the mean over samples.
6. The backward pass.
7. ``apply``: a loss that is not finite is written into a gradient, for the reduction to carry to all ranks.
8. ``LossScaleOptimizer.check_finite``: all ranks agree on whether a gradient has overflowed.
9. ``_clip_gradients``: the gradients are reduced over ranks, and monitored; then Keras clips them.
10. ``_apply_weight_decay``, ``_backend_update_step``, ``_update_model_variables_moving_average``,
    ``_overwrite_model_variables_with_average_value``: weight decay, update and EMA, unless this step is skipped. Those
    of a sharded optimizer work on this rank's parts of variables, and collect the updated parts of all ranks.

Methods of an optimizer are replaced on the object, not in a subclass, for Keras writes an optimizer's class into a
saved model. A training loop replaces those of steps 4, 5 and 7 (:class:`LoopHooks`), ``DistributedOptimizer`` those of
steps 9 and 10 of each optimizer that applies gradients (:class:`GradientHooks`). Steps 2, 3 and 8 are replaced in
Keras' classes, and do nothing unless the model's optimizer is distributed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.batch_norm import moments_over_ranks
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient, values_of
from hvdtrain.distributed.optimizers import is_horovods_own, leaves_of, optimizers_of
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.errors import UsageError
from hvdtrain.optim import global_loss
from hvdtrain.optim.ema import after_last_micro_batch, moving_average_per_update, ramped_momentum
from hvdtrain.optim.equal_steps import with_equal_ranks
from hvdtrain.optim.fused_sgd import fused_update_step
from hvdtrain.optim.guarded_updates import unless_skipped, when_checked
from hvdtrain.optim.hook_state import (
    GradientHooks,
    InstalledHooks,
    LoopHooks,
    gradient_hooks,
    installed_hooks,
    model_hooks,
)
from hvdtrain.optim.sharded_updates import sharded_methods
from hvdtrain.optim.step_reduction import reduce_step

# Step 1: the forward pass.


def synchronize_batch_normalization(
    model: keras.Model,
    *,
    all_layers: bool = True,
    collectives: Collectives | None = None,
    sample_weight: Callable[[], tf.Tensor | None] = lambda: None,
) -> int:
    """Makes BatchNormalization layers compute mean and variance over the samples of all ranks.

    Outputs and gradients are then those of one process with the whole batch. Keras' own ``synchronized=True`` uses
    ``tf.distribute`` and reduces nothing between Horovod's ranks. One collective per layer forward, one backward.

    Args:
        model: a built model; its layers are changed in place, and a saved model shows only ``synchronized=True``.
        all_layers: False: only layers made with ``synchronized=True``.
        collectives: the collectives to reduce with (default: those of ``hvdtrain.init()``).
        sample_weight: while a step is traced, the weight of this rank's samples; 0 leaves them out.

    Returns:
        The number of synchronized layers.
    """
    collectives = collectives or runtime.current().collectives
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and (all_layers or layer.synchronized)
    ]
    for i, layer in enumerate(layers):
        layer.synchronized = True
        if collectives.reduces:
            layer._moments = moments_over_ranks(layer, f"hvdtrain_batchnorm_{i}", collectives, sample_weight)
    return len(layers)


# Steps 2 and 3: losses that are not a mean over samples.

_compute_loss_here = keras.losses.Loss.__call__
_make_train_function_here = keras.Model.make_train_function
_aggregate_additional_loss_here = keras.Model._aggregate_additional_loss
_compute_total_loss_here = keras.Model._compute_loss


def _compute_loss_over_ranks(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
    return global_loss.loss_over_ranks(self, functools.partial(_compute_loss_here, self), y_true, y_pred, sample_weight)


def _make_train_function_over_ranks(self: Any, force: bool = False) -> None:
    """For ``model.fit`` and ``model.train_on_batch``: Keras compiles a ``train_step`` that is run by the hooks.

    Without XLA, which Keras chooses on a GPU: it cannot compile Horovod's operations.
    """
    jit_compile = self.jit_compile
    reduces = any(hooks.collectives.reduces for hooks in model_hooks(self))
    restore = _replace(self, "train_step", functools.partial(run_train_step, self, self.train_step))
    self._jit_compile = jit_compile and not reduces
    try:
        _make_train_function_here(self, force)
    finally:
        self._jit_compile = jit_compile
        restore()


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


def make_test_function(model: Any, run: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Compiles a model's ``test_step``, run by a function that receives it and its data."""
    restore = _replace(model, "test_step", functools.partial(run, model.test_step))
    try:
        model.make_test_function(force=True)
    finally:
        restore()


keras.losses.Loss.__call__ = _compute_loss_over_ranks
keras.Model.make_train_function = _make_train_function_over_ranks
keras.Model.fit = with_equal_ranks(global_loss.with_loss_errors(keras.Model.fit))
keras.Model._aggregate_additional_loss = _add_share_of_loss
keras.Model._compute_loss = _compute_one_number


def run_train_step(model: Any, train_step: Callable[[Any], Any], data: Any) -> Any:
    """Runs a model's ``train_step``; its losses are combined over the ranks that reduce its gradients."""
    hooks = next(iter(model_hooks(model)), None)
    if hooks is None:
        return train_step(data)
    if hooks.epoch_steps is not None:
        data = hooks.epoch_steps.count(data)
    if hooks.reduction.op == "adasum":
        return train_step(data)
    scope = global_loss.LossScope(hooks.collectives, sums_gradients=hooks.reduction.op == "sum")
    if (loop := installed_hooks(optimizers_of(model)[0]).loop) is not None:
        scope = dataclasses.replace(scope, sample_weight=loop.sample_weight, excluded_by=loop.excluded_by)
    with global_loss.losses_over_ranks(scope):
        return train_step(data)


_apply_here = keras.optimizers.Optimizer.apply


def _apply_if_distributed(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """An optimizer that averages nothing would train every rank alone: Horovod's own, or one that was not wrapped."""
    if is_horovods_own(self):
        raise UsageError(
            "Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls the methods that it "
            f"overrides. Received: {self.name}, wrapped by it. Use hvdtrain.DistributedOptimizer."
        )
    if global_loss.loss_scope() is not None and installed_hooks(self).gradient is None:
        raise UsageError(
            "each optimizer that a train_step applies must be distributed. Received: "
            f"{self.name}, which is not. Wrap it in DistributedOptimizer, and keep it as an attribute of the model."
        )
    _apply_here(self, grads, trainable_variables)


keras.optimizers.Optimizer.apply = _apply_if_distributed


# Steps 4, 5 and 7: the loss and the gradients of this rank.


def install_loop_hooks(model: Any, hooks: LoopHooks) -> None:
    """Replaces the methods of steps 4, 5 and 7; the hooks of an earlier loop are removed."""
    for optimizer in optimizers_of(model):
        _restore_methods(installed_hooks(optimizer))
        _install_loop_hooks(optimizer, hooks)
    tracker = model._loss_tracker
    update_state = tracker.update_state

    def update_if_finite(loss: tf.Tensor, sample_weight: Any = None) -> Any:
        finite = tf.math.is_finite(loss)
        weight = tf.cast(1 if sample_weight is None else sample_weight, loss.dtype)
        return update_state(tf.where(finite, loss, 0), sample_weight=tf.where(finite, weight, 0))

    if hooks.skips_non_finite:
        installed = installed_hooks(optimizers_of(model)[0])
        installed.before_loop.append(_replace(tracker, "update_state", update_if_finite))


def _install_loop_hooks(optimizer: Any, hooks: LoopHooks) -> None:
    scale_loss, apply = optimizer.scale_loss, optimizer.apply
    loss_was_weighed = False

    def weigh_and_scale(loss: tf.Tensor) -> tf.Tensor:
        nonlocal loss_was_weighed
        loss_was_weighed = True
        return scale_loss(hooks.weigh_loss(loss))

    def prepare_and_apply(grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        nonlocal loss_was_weighed
        if hooks.held is not None:
            hooks.held.append((grads, trainable_variables))
            return
        hooks.num_applies += 1
        prepared = hooks.prepare_gradients(grads, loss_was_weighed)
        loss_was_weighed = False
        apply(prepared, trainable_variables)

    installed = installed_hooks(optimizer)
    installed.loop = hooks
    installed.before_loop = [
        _replace(optimizer, "scale_loss", weigh_and_scale),
        _replace(optimizer, "apply", prepare_and_apply),
    ]


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
    """Collects the results of the model's metrics that are computed in the block; several of one by their names."""
    recorded: list[tuple[keras.Metric, str | None, Any]] = []

    def recording(metric: keras.Metric) -> Callable[[], Any]:
        compute = metric.result

        def result() -> Any:
            value = compute()
            parts = value.items() if isinstance(value, dict) else [(None, value)]
            recorded.extend((metric, name, part) for name, part in parts)
            return value

        return result

    restores = [_replace(metric, "result", recording(metric)) for metric in model.metrics]
    try:
        yield recorded
    finally:
        for restore in restores:
            restore()


def remove_loop_hooks(model: Any) -> None:
    """Restores what a training loop has replaced, if anything; a distributed optimizer stays distributed."""
    for optimizer in optimizers_of(model):
        _restore_methods(installed_hooks(optimizer))
    for leaf in leaves_of(model):
        if (hooks := installed_hooks(leaf).gradient) is not None:
            hooks.monitor = hooks.applies = hooks.step_weight = None


def _restore_methods(installed: InstalledHooks) -> None:
    for restore in installed.before_loop:
        restore()
    installed.loop, installed.before_loop = None, []


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of an object; returns what restores it."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def restore() -> None:
        if before is None:
            del vars(owner)[name]  # The class' own is visible again.
        else:
            setattr(owner, name, before)

    return restore


@contextlib.contextmanager
def held_gradients(optimizer: Any) -> Iterator[list[tuple[Sequence[Any], Any]]]:
    """Collects the gradients that are applied in the block, with their variables, and applies none."""
    hooks = installed_hooks(optimizer).loop
    assert hooks is not None
    held: list[tuple[Sequence[Any], Any]] = []
    hooks.held = held
    try:
        yield held
    finally:
        hooks.held = None


# Step 8: all ranks skip a step together.

_check_finite_here = keras.optimizers.LossScaleOptimizer.check_finite


def _check_finite_on_every_rank(self: Any, gradients: list[tf.Tensor]) -> tf.Tensor:
    """Keras decides on each rank alone, and only the branch for finite gradients updates the variables.

    Without this: rank 0 overflows and skips; rank 1 does not, reduces its gradients, and waits for rank 0 forever.
    """
    finite = _check_finite_here(self, gradients)
    hooks = gradient_hooks(self)
    if hooks is None or hooks.are_reduced or not hooks.collectives.reduces:
        return finite
    return hooks.collectives.all_true(finite)


# On the class: model.compile() wraps a distributed optimizer in a LossScaleOptimizer of its own.
keras.optimizers.LossScaleOptimizer.check_finite = _check_finite_on_every_rank


# Steps 9 and 10: the reduction and the update.


def install_gradient_hooks(optimizer: Any, hooks: GradientHooks) -> None:
    """Replaces the methods of steps 9 and 10 of an optimizer that applies gradients."""
    if hooks.sharded is not None:
        for name, method in sharded_methods(optimizer, hooks.sharded).items():
            _replace(optimizer, name, method)
    apply, clip = optimizer.apply, optimizer._clip_gradients
    update_ema = optimizer._update_model_variables_moving_average
    if optimizer.gradient_accumulation_steps:
        update_ema = moving_average_per_update(optimizer)

    def apply_and_check(grads: Sequence[Gradient | None], trainable_variables: Any = None) -> None:
        before = hooks.num_reductions
        known = getattr(optimizer, "_trainable_variables", []) if trainable_variables is None else trainable_variables
        hooks.variables = [v for v, gradient in zip(known, grads, strict=False) if gradient is not None]
        with overwriting_once_per_step(optimizer):
            apply(grads, trainable_variables)
        # Training without a reduction looks healthy: every rank's loss falls. A user's own optimizer may not clip.
        # In eager mode, a micro-batch that completes no step rightly reduces nothing.
        waits = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
        if len(grads) > 0 and hooks.num_reductions == before and not waits:
            raise UsageError(
                "gradients must pass through Keras' _clip_gradients, where they are reduced. Received: "
                f"{type(optimizer).__name__}, which applied them without it. Do not override apply or "
                "_backend_apply_gradients in it."
            )

    def reduce_then_clip(gradients: list[Gradient]) -> list[Gradient]:
        hooks.num_reductions += 1
        is_local = hooks.are_local(hooks.variables)
        shared = [variable for variable, local in zip(hooks.variables, is_local, strict=True) if not local]
        hooks.equal_start.require([*shared, *whole_variables(optimizer.variables)], hooks.collectives)
        reduced = reduce_step(hooks, gradients)
        checked = reduced.gradients if hooks.monitor is None else hooks.monitor(reduced, hooks.variables)
        hooks.checked = [values_of(each) for each in checked[:1]]
        return clip(checked)

    def ramp_and_update_ema(trainable_variables: Sequence[keras.Variable]) -> None:
        with ramped_momentum(optimizer) if hooks.ema_ramp else contextlib.nullcontext():
            unless_skipped(update_ema, hooks)(trainable_variables)

    optimizer.apply = apply_and_check
    optimizer._clip_gradients = reduce_then_clip
    optimizer._apply_weight_decay = when_checked(unless_skipped(optimizer._apply_weight_decay, hooks), hooks)
    optimizer._backend_update_step = when_checked(unless_skipped(optimizer._backend_update_step, hooks), hooks)
    optimizer.update_step = fused_update_step(optimizer)
    optimizer._update_model_variables_moving_average = ramp_and_update_ema
    installed_hooks(optimizer).gradient = hooks


@contextlib.contextmanager
def overwriting_once_per_step(optimizer: Any) -> Iterator[None]:
    """In the block the EMA overwrites the weights only after a step's last micro-batch; Keras: after each."""
    if not optimizer.gradient_accumulation_steps:
        yield
        return
    name = "_overwrite_model_variables_with_average_value"
    restore = _replace(optimizer, name, after_last_micro_batch(optimizer, getattr(optimizer, name)))
    try:
        yield
    finally:
        restore()
