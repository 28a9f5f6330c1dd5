"""The compiled training step: Keras' own ``train_step``, several steps per call, on this rank's samples."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.gradient_reduction import values_of, with_values
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.distributed_optimizer import require_hooks
from hvdtrain.optim.equal_start import EqualStart
from hvdtrain.optim.global_loss import JIT_COMPILE, UncompilableLossError, loss_error, require_one_number
from hvdtrain.optim.hook_state import LoopHooks, model_hooks
from hvdtrain.optim.hooks import install_loop_hooks, run_train_step
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_monitor import GradientMonitor, is_not_finite
from hvdtrain.training.held_gradients import gradients_of_step
from hvdtrain.training.returned_results import ReturnedResults
from hvdtrain.training.step_snapshot import StepSnapshot
from hvdtrain.training.step_times import StepTimes
from hvdtrain.training.xla import (
    LargeSparseGradientError,
    UncompilableModelError,
    compiled_train_step,
    compiles_update,
    dense_gradients,
    is_uncompilable,
)


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """How the losses of ranks and micro-batches are weighted, so that their mean is the mean over samples."""

    is_weighted: bool
    """False if every micro-batch of every step has the same weight, so that nothing is multiplied."""
    has_fillers: bool
    """Whether a rank may get a sample of weight zero."""
    loss_sums: bool
    """Whether the losses sum over the batch: micro-batches then have equal weights, except for fillers."""


class TrainStep:
    """Runs a compiled model's ``train_step``, up to ``steps_per_execution`` steps in one call.

    Args:
        model: a compiled Keras model with a distributed optimizer.
        feed: this rank's micro-batches.
        times: counts the steps and records where their time is spent.
        monitor: receives losses and gradients.
        jit_compile_is_optional: whether XLA is left out instead of refusing a loss that it excludes.
    """

    def __init__(
        self,
        model: keras.Model,
        feed: TrainingFeed,
        config: StepConfig,
        *,
        times: StepTimes,
        monitor: GradientMonitor,
        weights: LossWeights,
        jit_compile_is_optional: bool = False,
    ):
        self._model = model
        self._feed = feed
        self._times = times
        self._monitor = monitor
        self._weights = weights
        self._jit_compile, self._jit_compile_is_optional = bool(config.jit_compile), jit_compile_is_optional
        self._compiles_update = self._jit_compile and not monitor.needs_gradients and compiles_update(model, config)
        self._micro_batches_per_step = config.gradient_accumulation_steps
        self.max_steps = config.steps_per_execution
        """The most steps that one call can make."""
        self.returned = ReturnedResults()
        """What the model's ``train_step`` returns."""
        self.snapshot: StepSnapshot | None = None
        """If not None, what is restored when a step is interrupted."""
        self._sample_weight: tf.Tensor | None = None
        self._loss: tf.Tensor | None = None
        # Horovod's operations cannot be part of a cluster compiled by XLA, which Keras chooses on a GPU.
        model.jit_compile = False
        model.steps_per_execution = 1
        # A skipped step has gone through BatchNormalization, whose statistics would keep its NaN: they are reset to
        # their values at the start of the step.
        self._statistics: list[tuple[keras.Variable, tf.Variable]] = []
        if monitor.applies is not None:
            variables = [v for v in model.non_trainable_weights if keras.backend.is_float_dtype(v.dtype)]
            self._statistics = [(each, tf.Variable(each.value, trainable=False)) for each in variables]
        scales_loss = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        skips_non_finite = config.guards.on_nan == "skip" or scales_loss
        self._hooks = LoopHooks(
            self._weigh_loss,
            self._prepare_gradients,
            skips_non_finite,
            sample_weight=self.sample_weight,
            excluded_by=[
                option
                for option, is_set in (("--quorum", config.stragglers.is_active), (JIT_COMPILE, self._jit_compile))
                if is_set
            ],
        )
        install_loop_hooks(model, self._hooks)
        self._step_weight = tf.Variable(0.0, trainable=False)
        """This rank's mean weight in the micro-batches of the current step so far."""
        self._divides_by_weight = config.guards.bad_samples > 0 and not weights.loss_sums
        """Whether samples may be left out of a mean over samples."""
        for leaf in leaves_of(model):
            require_hooks(leaf).step_weight = self._step_weight.read_value if self._divides_by_weight else None
        # One compiled function for calls of every length: a rank that completes a call after an error has to meet the
        # others in theirs.
        self._is_single = self.max_steps * self._micro_batches_per_step == 1
        self._iterator: Iterator[Any] | None = None
        self._call: Callable[..., Any] = self._run_one

    @property
    def steps_made(self) -> int:
        """Number of complete steps that this rank has made."""
        return self._times.micro_batches // self._micro_batches_per_step

    def skip_to(self, step: int) -> None:
        """Continues to count from this step, which other ranks have made."""
        self._times.restore(step)

    def sample_weight(self) -> tf.Tensor | None:
        """While a step is traced: the weight of this rank's micro-batch; None if all have the same."""
        return self._sample_weight

    def weigh_ranks_equally(self) -> None:
        """From now on this rank's samples have the same weight in its steps, however many the other ranks have."""
        self._weights = dataclasses.replace(self._weights, loss_sums=True)
        self._divides_by_weight = False
        for leaf in leaves_of(self._model):
            require_hooks(leaf).step_weight = None
        self._iterator = None

    def run(self, steps: int) -> None:
        """Makes one call of this many steps, skipping samples that cannot be read.

        Raises:
            DataError: more samples are unreadable than allowed.
            NonFiniteError: a loss or a gradient is not finite, with ``on_nan='stop'``.
        """
        last_step = None if self._is_single else self.steps_made + steps
        try:
            self._run_call(steps * self._micro_batches_per_step)
        except tf.errors.OpError as error:
            self._complete(error, self.steps_made + 1 if last_step is None else last_step)

    def _complete(self, error: tf.errors.OpError, last_step: int) -> None:
        """Completes a call without the samples that cannot be read; the other ranks wait in a reduction meanwhile."""
        while self.steps_made < last_step:
            if is_secondary(error):
                raise error
            if is_not_finite(error):
                raise self._not_finite(self.steps_made + 1) from None
            self._feed.resume_after(error, self._times.micro_batches)
            try:
                self._run_call(last_step * self._micro_batches_per_step - self._times.micro_batches)
            except tf.errors.OpError as another:
                error = another

    def settle(self) -> None:
        """Waits for the steps that were made: a step that XLA compiles as a whole is checked during the next call.

        Call it before anything uses their results.

        Raises:
            NonFiniteError: a loss or a gradient was not finite, with ``on_nan='stop'``.
        """
        if self._compiles_update:
            self._require_finite(self._monitor.halted_at.numpy())

    def _require_finite(self, halted_at: int) -> None:
        if halted_at:
            raise self._not_finite(halted_at)

    def _run_call(self, micro_batches: int) -> None:
        if self._feed.iterator is not self._iterator:
            self._compile_for(self._feed.iterator)
        arguments = [] if self._is_single else [tf.constant(micro_batches)]
        try:
            with self._explained_errors():
                halted_at = self._call(*arguments)
        except UncompilableModelError:
            # Before the first step: nothing has been computed but the batch.
            if not self._jit_compile_is_optional:
                raise
            self._leave_out_xla()
            self._feed.start(self._times.micro_batches)
            self._iterator = None
            self._run_call(micro_batches)
            return
        if halted_at is not None:
            self._require_finite(int(halted_at))

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            if (refusal := loss_error(error)) is not None:
                raise refusal from None
            if self._jit_compile and is_uncompilable(error):
                cause = next(line for line in str(error).splitlines() if "XLA" in line)
                raise UncompilableModelError(
                    f"XLA cannot compile this model: {cause}. Set --no-jit-compile."
                ) from error
            raise

    @contextlib.contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Raises what a user can act on for errors of :meth:`gradients` and :meth:`update` when they run.

        Raises:
            NonFiniteError: a loss or a gradient is not finite, with ``on_nan='stop'``.
            UsageError: the model's loss cannot be combined over ranks, or XLA cannot compile the model.
        """
        try:
            with self._explained_errors():
                yield
        except tf.errors.OpError as error:
            if is_not_finite(error):
                raise self._not_finite(self.steps_made + 1) from None
            raise

    def _not_finite(self, step: int) -> NonFiniteError:
        return self._monitor.error(step, require_hooks(leaves_of(self._model)[0]).collectives)

    def _compile_for(self, iterator: Iterator[Any]) -> None:
        # The iterator is captured by the function: passing it at each call costs Python as long as a small step.
        self._iterator = iterator
        function = partial(self._run_one if self._is_single else self._run_several, iterator)
        if self._compiles_update:
            function = partial(self._checking_the_call_before, function)
        if self._model.run_eagerly:
            self._call = function
        else:
            self._call = tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)

    # What is traced, from here on.

    def _checking_the_call_before(self, run: Callable[..., None], *arguments: tf.Tensor) -> tf.Tensor:
        """Returns whether the calls so far halted, which is copied to the host while a GPU computes this one."""
        halted_at = self._monitor.halted_at.read_value()
        with tf.device("CPU"):
            on_host = tf.identity(halted_at)
        run(*arguments)
        return on_host

    def _run_several(self, iterator: Iterator[Any], batches: tf.Tensor) -> None:
        def body(done: tf.Tensor) -> list[tf.Tensor]:
            self._run_one(iterator)
            return [done + 1]

        tf.while_loop(lambda done: done < batches, body, [tf.constant(0)], parallel_iterations=1)

    def _run_one(self, iterator: Iterator[Any]) -> None:
        data, sample_weight = self._times.next_batch(iterator)
        # If the iterator fails, nothing of the step may have happened: counters and random states do not depend on
        # the batch, and would otherwise get ahead of the other ranks'.
        with tf.control_dependencies(tf.nest.flatten((data, sample_weight), expand_composites=True)):
            self._train_on_batch(data, sample_weight)
            self._count()

    def _count(self) -> None:
        # A step that raises must not be counted: count after an update by each optimizer.
        updated = [hooks.variables for hooks in model_hooks(self._model) if hooks.variables]
        smallest = [min(each, key=lambda variable: variable.value.shape.num_elements()) for each in updated]
        with tf.control_dependencies([variable.value.read_value() for variable in smallest]):
            self._times.end_micro_batch()

    def gradients(self, data: Any, sample_weight: tf.Tensor) -> tuple[Sequence[Any], Sequence[keras.Variable]]:
        """This rank's gradients of a micro-batch, multiplied by its weight, and their variables; updates nothing."""
        self._sample_weight, self._loss = sample_weight, None
        for variable, copy in self._statistics:
            copy.assign(variable.value)
        try:
            try:
                self._loss, found, variables = self._held_gradients(data)
            except UncompilableLossError as error:
                self._leave_out_xla(error)
                self._loss, found, variables = self._held_gradients(data)
            prepared = self._prepare_gradients(found, self._loss is not None)
            self._monitor.end_gradients()
            return prepared, variables
        finally:
            self._sample_weight = self._loss = None

    def _held_gradients(self, data: Any) -> tuple[tf.Tensor | None, Sequence[Any], Sequence[keras.Variable]]:
        model = self._model
        train_step = model.train_step if self._jit_compile else partial(self.returned.run, model, model.train_step)
        return gradients_of_step(
            model, train_step, data, lambda: self._loss, option="--quorum", jit_compile=self._jit_compile
        )

    def _leave_out_xla(self, error: UncompilableLossError | None = None) -> None:
        """Continues to trace a step without XLA, unless it was asked for."""
        if error is not None and not self._jit_compile_is_optional:
            raise error
        self._jit_compile, self._compiles_update, self._loss = False, False, None
        self._hooks.excluded_by = [option for option in self._hooks.excluded_by if option != JIT_COMPILE]

    def update(self, gradients: Sequence[Any], variables: Sequence[keras.Variable], has_contributed: tf.Tensor) -> None:
        """Makes a step of reduced gradients.

        Args:
            has_contributed: whether this rank's :meth:`gradients` are part of them.
        """
        with self._monitor.update_of(has_contributed):
            self._model.optimizer.apply(gradients, variables)
        if (applies := self._monitor.applies) is not None:
            _restore_unless(applies.read_value() | ~has_contributed, self._statistics)
        self._count()

    @property
    def times(self) -> StepTimes:
        """Counts the steps."""
        return self._times

    def _train_on_batch(self, data: Any, sample_weight: tf.Tensor) -> None:
        model = self._model
        if self.snapshot is not None:
            self.snapshot.take()
        if self._compiles_update:
            try:
                self._make_compiled_step(data, sample_weight)
                return
            except LargeSparseGradientError:
                self._compiles_update = False
        if self._jit_compile:
            try:
                self._make_step(sample_weight, partial(self._compute_then_update, data))
                return
            except UncompilableLossError as error:
                self._leave_out_xla(error)
        train_step = partial(self.returned.run, model, model.train_step)
        self._make_step(sample_weight, lambda: run_train_step(model, train_step, data))

    def _compute_then_update(self, data: Any) -> None:
        """Has XLA compile a step up to its gradients."""
        self._loss, update = compiled_train_step(self._model, data, lambda: self._loss)
        update()

    def _make_compiled_step(self, data: Any, sample_weight: tf.Tensor) -> None:
        """Has XLA compile a whole step, which updates everything and then restores it if a gradient is not finite."""
        model = self._model

        def make(data: Any, sample_weight: tf.Tensor, step: tf.Tensor) -> None:
            variables = [*model.trainable_variables, *self._restored_variables()]
            before = [variable.value.read_value() for variable in variables]
            with self._monitor.deciding_on_device(), dense_gradients(model):
                self._make_step(sample_weight, lambda: run_train_step(model, model.train_step, data))
            if (keeps := self._monitor.keeps_update(step)) is not None:
                _restore_unless(keeps, zip(variables, before, strict=True))

        function = tf.function(make, jit_compile=True, autograph=False)
        function(data, sample_weight, self._times.current_step())
        self._times.record_computation()

    def _restored_variables(self) -> list[keras.Variable]:
        """The optimizer's variables that a step does not change whose gradient is not finite."""
        optimizer = self._model.optimizer
        # Of a skipped step, Keras counts the iteration.
        return [v for v in optimizer.variables if self._monitor.applies is None or v is not optimizer.iterations]

    def _make_step(self, sample_weight: tf.Tensor, train: Callable[[], object]) -> None:
        """Runs a ``train_step`` with its loss weighted; restores what it changed in vain."""
        model, applies = self._model, self._monitor.applies
        self._sample_weight = sample_weight if self._weights.is_weighted else None
        self._loss = None
        if self._divides_by_weight:
            part = tf.cast(sample_weight, tf.float32) / self._micro_batches_per_step
            self._step_weight.assign(tf.where(self._times.begins_step(), part, self._step_weight + part))
        try:
            metrics = model.metrics_variables if self._weights.has_fillers else []
            metrics_before = [tf.identity(variable.value) for variable in metrics]
            if applies is not None:
                is_first = self._times.begins_step()
                for variable, copy in self._statistics:
                    copy.assign(tf.where(is_first, variable.value, copy))
            applies_before = self._hooks.num_applies
            train()
            if self._hooks.num_applies == applies_before:
                raise UsageError(
                    "train_step must apply gradients by an optimizer that is an attribute of the model. Received: "
                    f"{type(model).__name__}.train_step, which applies none. Assign the optimizer to the model."
                )
            _restore_unless(sample_weight > 0, zip(metrics, metrics_before, strict=True))
            if applies is not None:
                _restore_unless(applies.read_value(), self._statistics)
        finally:
            self._sample_weight = self._loss = None

    def _weigh_loss(self, loss: tf.Tensor) -> tf.Tensor:
        require_one_number(loss)
        self._loss = loss
        return self._weighted(loss)

    def _weighted(self, value: tf.Tensor) -> tf.Tensor:
        if self._sample_weight is None:
            return value
        weight = self._sample_weight > 0 if self._weights.loss_sums else self._sample_weight
        return value * tf.cast(weight, value.dtype)

    def _prepare_gradients(self, gradients: Sequence[Any], loss_was_weighed: bool) -> Sequence[Any]:
        if loss_was_weighed:
            return self._monitor.mark_non_finite(self._loss, gradients)
        # A user's own train_step need not call scale_loss. The gradient of a weighted loss is the weighted gradient.
        weighted = [None if each is None else with_values(each, self._weighted(values_of(each))) for each in gradients]
        return self._monitor.mark_non_finite(None, weighted)


def build_by_tracing(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of a model that is not built, and of its optimizers if it has several.

    Only its ``train_step`` knows how it calls its parts, and which variables each optimizer trains.

    Args:
        element_spec: of ``(data, sample_weight)``, as the feed yields it.

    Raises:
        UsageError: the model has no variables.
    """
    if not replica_consistency.is_built(model) or not (
        optimizers_of(model) == [model.optimizer] or all(each.built for each in optimizers_of(model))
    ):
        trace_train_step(model, element_spec)
    if not model.variables:
        raise UsageError(f"model {model.name!r} must have variables to train. Received: none.")


def trace_train_step(model: keras.Model, element_spec: Any) -> None:
    """Traces a model's ``train_step``, which creates the variables that it needs, and runs nothing.

    Args:
        element_spec: of ``(data, sample_weight)``, as the feed yields it.
    """
    data, _ = element_spec
    distributed = model_hooks(model)
    for hooks in distributed:
        hooks.equal_start = EqualStart(SingleProcessCollectives())  # Replicas become equal later.
    step = tf.function(tf.autograph.experimental.do_not_convert(lambda data: [model.train_step(data), None][1]))
    step.get_concrete_function(data)
    for hooks in distributed:
        hooks.equal_start = EqualStart(hooks.collectives)
    model.reset_metrics()


def _restore_unless(condition: tf.Tensor, values: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
    for variable, value in values:
        variable.assign(tf.where(condition, variable.value, value))
