"""The compiled training step: Keras' own ``train_step``, several steps per call, on this rank's samples."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.exclusions import JIT_COMPILE, QUORUM, Option
from hvdtrain.config.wording import option
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import values_of, with_values
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.distributed.row_lookup import unknown_id_error
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.optim.global_loss import UncompilableLossError, loss_error, require_one_number
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.keras_calls import call_weigh_and_mark, finite_losses, run_train_step
from hvdtrain.optim.pipeline import Pipelines, Scope, in_scope, require_pipelines
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_checks import DeviceCheck, host_checks, is_not_finite
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.held_gradients import gradients_of_step
from hvdtrain.training.loss_marker import LossMarker
from hvdtrain.training.returned_results import ReturnedResults
from hvdtrain.training.step_snapshot import StepSnapshot
from hvdtrain.training.step_times import StepTimes
from hvdtrain.training.tracing import trace_train_step
from hvdtrain.training.xla import (
    LargeSparseGradientError,
    UncompilableModelError,
    compiles_update,
    is_uncompilable,
    pipelines_on_device,
)


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """How the losses of ranks and micro-batches are weighted, so that their mean is the mean over samples."""

    is_weighted: bool
    """False if every micro-batch of every step has the same weight, so that nothing is multiplied."""
    has_fillers: bool
    """Whether a rank may get a sample of weight zero."""
    leaves_out_samples: bool
    """Whether unreadable samples may be left out of a batch."""
    loss_sums: bool
    """Whether the losses sum over the batch: micro-batches then have equal weights, except for fillers."""


class TrainStep:
    """Runs a compiled model's ``train_step``, up to ``steps_per_execution`` steps in one call.

    Args:
        model: a compiled Keras model with a distributed optimizer.
        feed: this rank's micro-batches.
        times: counts the steps and records where their time is spent.
        record: receives norms and non-finite values of the gradients.
        jit_compile_is_optional: whether XLA is left out instead of refusing a loss that it excludes.
    """

    def __init__(
        self,
        model: keras.Model,
        feed: TrainingFeed,
        config: StepConfig,
        *,
        times: StepTimes,
        record: GradientRecord,
        weights: LossWeights,
        jit_compile_is_optional: bool = False,
    ):
        self.model = model
        """What is trained."""
        self._feed = feed
        self._times = times
        self._record = record
        self._weights = weights
        self._jit_compile, self._jit_compile_is_optional = bool(config.jit_compile), jit_compile_is_optional
        self._compiles_update = self._jit_compile and not record.copy_every and compiles_update(model, config)
        self._has_quorum = config.stragglers.is_active
        self._micro_batches_per_step = config.gradient_accumulation_steps
        self.max_steps = config.steps_per_execution
        """The most steps that one call can make."""
        self.batches = KeptBatch()
        """Keeps the batch of a step for a check after it."""
        self.returned = ReturnedResults()
        """What the model's ``train_step`` returns."""
        self._snapshot: StepSnapshot | None = None
        self._sample_weight: tf.Tensor | None = None
        self._loss: tf.Tensor | None = None
        # Horovod's operations cannot be part of a cluster compiled by XLA, which Keras chooses on a GPU.
        model.jit_compile = False
        model.steps_per_execution = 1
        on_nan = config.guards.on_nan
        scales_loss = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self._skips = on_nan == "skip"
        self._leaves_out_losses = self._skips or scales_loss
        # A skipped step has gone through BatchNormalization, whose statistics would keep its NaN: they are reset to
        # their values at the start of the step.
        self._statistics: list[tuple[keras.Variable, tf.Variable]] = []
        if self._skips:
            variables = [
                v for v in whole_variables(model.non_trainable_weights) if keras.backend.is_float_dtype(v.dtype)
            ]
            self._statistics = [(each, tf.Variable(each.value, trainable=False)) for each in variables]
        self._step_weight = tf.Variable(0.0, trainable=False)
        """This rank's mean weight in the micro-batches of the current step so far."""
        self._divides_by_weight = weights.leaves_out_samples and not weights.loss_sums
        """Whether samples may be left out of a mean over samples."""
        self._marker = LossMarker(times)
        self._device_check = DeviceCheck(record, self._marker, on_nan=on_nan)
        for optimizer in optimizers_of(model):
            call_weigh_and_mark(optimizer)
        own = require_pipelines(model)
        self._checks = host_checks(len(own), record, self._marker, times, on_nan=on_nan)
        step_weight = self._step_weight.read_value if self._divides_by_weight else None
        self._pipelines: Pipelines = [
            (
                leaf,
                dataclasses.replace(
                    pipeline,
                    weigh=self._weigh_loss,
                    mark=self._mark_gradients,
                    reduce=dataclasses.replace(pipeline.reduce, step_weight=step_weight),
                    check=check,
                ),
            )
            for (leaf, pipeline), check in zip(own, self._checks, strict=True)
        ]
        # One compiled function for calls of every length: a rank that completes a call after an error has to meet the
        # others in theirs.
        self._is_single = self.max_steps * self._micro_batches_per_step == 1
        self._iterator: Iterator[Any] | None = None
        self._call: Callable[..., Any] = self._run_one

    @property
    def pipelines(self) -> Pipelines:
        """What happens to the gradients of the optimizers."""
        return self._pipelines

    def use_pipelines(self, pipelines: Pipelines) -> None:
        """Makes steps with other pipelines from now on: compiles them again."""
        self._pipelines = pipelines
        self._iterator = None

    @property
    def _collectives(self) -> Collectives:
        return self._pipelines[0][1].reduce.collectives

    @property
    def steps_made(self) -> int:
        """Number of complete steps that this rank has made."""
        return self._times.state()

    def skip_to(self, step: int) -> None:
        """Continues to count from this step, which other ranks have made."""
        self._times.restore(step)

    def sample_weight(self) -> tf.Tensor | None:
        """While a step is traced: the weight of this rank's micro-batch; None if all have the same."""
        return self._sample_weight

    def gradient_weight(self) -> tf.Tensor | None:
        """While a backward pass is traced: the weight by which gradients are multiplied, if the loss was not."""
        return None if self._loss is not None or self._weights.loss_sums else self._sample_weight

    def train_over(self, collectives: Collectives) -> None:
        """Reduces over other ranks from now on; all samples have the same weight, however many a rank has."""
        self._weights = dataclasses.replace(self._weights, loss_sums=True)
        self._divides_by_weight = False
        self.use_pipelines(
            [
                (
                    leaf,
                    dataclasses.replace(
                        pipeline, reduce=dataclasses.replace(pipeline.reduce.over(collectives), step_weight=None)
                    ),
                )
                for leaf, pipeline in self._pipelines
            ]
        )

    def keep_snapshot(self) -> None:
        """From now on, a step that is interrupted can be undone; call it when the metrics are built."""
        if compression_memories(self.model):  # created in the first step
            trace_train_step(self.model, self._feed.element_spec)
        self._snapshot = StepSnapshot(self.model, self._times)

    def undo_interrupted(self) -> None:
        """Restores what an interrupted step has changed, so that it can be repeated."""
        if self._snapshot is not None:
            self._snapshot.undo(self.steps_made + 1)

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
            self._require_finite(int(self._device_check.halted_at.numpy()))

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
            if (refusal := loss_error(error) or unknown_id_error(error)) is not None:
                raise refusal from None
            if self._jit_compile and is_uncompilable(error):
                cause = next(line for line in str(error).splitlines() if "XLA" in line)
                raise UncompilableModelError(
                    f"XLA cannot compile this model: {cause}. Set {option('jit_compile', False)}."
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
        return self._record.error(step, self._collectives)

    def _compile_for(self, iterator: Iterator[Any]) -> None:
        # The iterator is captured by the function: passing it at each call costs Python as long as a small step.
        self._iterator = iterator
        function = partial(self._run_one if self._is_single else self._run_several, iterator)
        if self._compiles_update:
            function = partial(self._checking_the_call_before, function)
        if self.model.run_eagerly:
            self._call = function
        else:
            self._call = tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)

    # What is traced, from here on.

    def _checking_the_call_before(self, run: Callable[..., None], *arguments: tf.Tensor) -> tf.Tensor:
        """Returns whether the calls so far halted, which is copied to the host while a GPU computes this one."""
        halted_at = self._device_check.halted_at.read_value()
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
            with self._traced() as scope:
                self._train_on_batch(data, sample_weight)
            self._count(scope)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[Scope]:
        """In the block, a part of a step is traced."""
        leaves_out = finite_losses(self.model) if self._leaves_out_losses else contextlib.nullcontext()
        with in_scope(self._pipelines) as scope, leaves_out:
            try:
                yield scope
            finally:
                self._sample_weight = self._loss = None

    def _count(self, scope: Scope) -> None:
        # A step that raises must not be counted: count after an update by each optimizer.
        updated = [each.variables for each in scope.applied if each.variables]
        smallest = [min(each, key=lambda variable: variable.value.shape.num_elements()) for each in updated]
        with tf.control_dependencies([variable.value.read_value() for variable in smallest]):
            self._times.end_micro_batch()

    def gradients(self, data: Any, sample_weight: tf.Tensor) -> tuple[Sequence[Any], Sequence[keras.Variable]]:
        """This rank's gradients of a micro-batch, multiplied by its weight, and their variables; updates nothing."""
        self.batches.observe(data)
        for variable, copy in self._statistics:
            copy.assign(variable.value)
        with self._traced():
            self._sample_weight = sample_weight
            try:
                found, variables = self._gradients(data, option=QUORUM)
            except UncompilableLossError as error:
                self._leave_out_xla(error)
                found, variables = self._gradients(data, option=QUORUM)
            marked = self._mark_gradients(found, self._loss is not None)
            self._marker.end_gradients()
            return marked, variables

    def _gradients(self, data: Any, *, option: Option) -> tuple[Sequence[Any], Sequence[keras.Variable]]:
        run = self._run_train_step if self._jit_compile else self._run_and_record
        self._loss, found, variables = gradients_of_step(
            self.model, run, data, lambda: self._loss, option=option, jit_compile=self._jit_compile
        )
        return found, variables

    def _run_and_record(self, data: Any) -> Any:
        """Runs the model's ``train_step``, and records what it returns."""
        return self.returned.run(self.model, self._run_train_step, data)

    def _run_train_step(self, data: Any) -> Any:
        excluding = ((QUORUM, self._has_quorum), (JIT_COMPILE, self._jit_compile))
        excluded_by = [each for each, is_set in excluding if is_set]
        train_step = self.model.train_step
        return run_train_step(
            self.model,
            train_step,
            data,
            sample_weight=self.sample_weight,
            gradient_weight=self.gradient_weight,
            excluded_by=excluded_by,
        )

    def _leave_out_xla(self, error: UncompilableLossError | None = None) -> None:
        """Continues to trace a step without XLA, unless it was asked for."""
        if error is not None and not self._jit_compile_is_optional:
            raise error
        self._jit_compile, self._compiles_update, self._loss = False, False, None

    def update(self, gradients: Sequence[Any], variables: Sequence[keras.Variable], has_contributed: tf.Tensor) -> None:
        """Makes a step of reduced gradients.

        Args:
            has_contributed: whether this rank's :meth:`gradients` are part of them.
        """
        with self._traced() as scope:
            with self._marker.update_of(has_contributed):
                self.model.optimizer.apply(gradients, variables)
            if (applies := self._checks[0].applies) is not None:
                _restore_unless(applies.read_value() | ~has_contributed, self._statistics)
        self._count(scope)

    @property
    def times(self) -> StepTimes:
        """Counts the steps."""
        return self._times

    def _train_on_batch(self, data: Any, sample_weight: tf.Tensor) -> None:
        self.batches.observe(data)
        if self._snapshot is not None:
            self._snapshot.take()
        if self._compiles_update:
            try:
                self._make_compiled_step(data, sample_weight)
                return
            except LargeSparseGradientError:
                self._compiles_update = False
        if self._jit_compile:
            try:
                self._make_step(sample_weight, partial(self._compute_then_apply, data))
                return
            except UncompilableLossError as error:
                self._leave_out_xla(error)
        self._make_step(sample_weight, partial(self._run_and_record, data))

    def _compute_then_apply(self, data: Any) -> None:
        """Has XLA compile a step up to its gradients."""
        gradients, variables = self._gradients(data, option=JIT_COMPILE)
        self.model.optimizer.apply(gradients, variables)

    def _make_compiled_step(self, data: Any, sample_weight: tf.Tensor) -> None:
        """Has XLA compile a whole step, which updates everything and then restores it if a gradient is not finite."""
        model, check = self.model, self._device_check
        optimizer = model.optimizer
        # Of a skipped step, Keras counts the iteration.
        restored = [v for v in optimizer.variables if not self._skips or v is not optimizer.iterations]
        restored += [*model.trainable_variables, *(variable for variable, _ in self._statistics)]

        def make(data: Any, sample_weight: tf.Tensor, step: tf.Tensor) -> None:
            before = [variable.value.read_value() for variable in restored]
            check.begin()
            with in_scope(pipelines_on_device(self._pipelines, check)):
                self._run_weighted(sample_weight, partial(self._run_train_step, data))
            if (keeps := check.keeps_update(step)) is not None:
                _restore_unless(keeps, zip(restored, before, strict=True))

        function = tf.function(make, jit_compile=True, autograph=False)
        function(data, sample_weight, self._times.current_step())
        self._times.record_computation()

    def _make_step(self, sample_weight: tf.Tensor, train: Callable[[], object]) -> None:
        """Makes a step; if it is skipped, the statistics of before are restored."""
        applies = self._checks[0].applies
        if applies is not None:
            is_first = self._times.begins_step()
            for variable, copy in self._statistics:
                copy.assign(tf.where(is_first, variable.value, copy))
        self._run_weighted(sample_weight, train)
        if applies is not None:
            _restore_unless(applies.read_value(), self._statistics)

    def _run_weighted(self, sample_weight: tf.Tensor, train: Callable[[], object]) -> None:
        """Runs a ``train_step`` with its loss weighted; a batch of weight zero does not change metrics."""
        model = self.model
        self._sample_weight = sample_weight if self._weights.is_weighted else None
        self._loss = None
        if self._divides_by_weight:
            part = tf.cast(sample_weight, tf.float32) / self._micro_batches_per_step
            self._step_weight.assign(tf.where(self._times.begins_step(), part, self._step_weight + part))
        metrics = model.metrics_variables if self._weights.has_fillers else []
        metrics_before = [tf.identity(variable.value) for variable in metrics]
        with in_scope([]) as scope:
            num_applied = len(scope.applied)
            train()
        if len(scope.applied) == num_applied:
            raise UsageError(
                "train_step must apply gradients by an optimizer that is an attribute of the model. Received: "
                f"{type(model).__name__}.train_step, which applies none. Assign the optimizer to the model."
            )
        _restore_unless(sample_weight > 0, zip(metrics, metrics_before, strict=True))

    def _weigh_loss(self, loss: tf.Tensor) -> tf.Tensor:
        require_one_number(loss)
        self._loss = loss
        return self._weighted(loss)

    def _weighted(self, value: tf.Tensor) -> tf.Tensor:
        if self._sample_weight is None:
            return value
        weight = self._sample_weight > 0 if self._weights.loss_sums else self._sample_weight
        return value * tf.cast(weight, value.dtype)

    def _mark_gradients(self, gradients: Sequence[Any], loss_was_weighed: bool) -> Sequence[Any]:
        if loss_was_weighed:
            return self._marker.mark(self._loss, gradients)
        # A user's own train_step need not call scale_loss. The gradient of a weighted loss is the weighted gradient.
        weighted = [None if each is None else with_values(each, self._weighted(values_of(each))) for each in gradients]
        return self._marker.mark(None, weighted)


def _restore_unless(condition: tf.Tensor, values: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
    for variable, value in values:
        variable.assign(tf.where(condition, variable.value, value))
