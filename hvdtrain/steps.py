"""The compiled train and evaluation step: Keras' own, run several at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.gradient_watch import GradientWatch
from hvdtrain.timing.step_times import StepTimes
from hvdtrain.xla import compiled_train_step, is_uncompilable

_ORIGINALS = "_hvdtrain_originals"


class CompiledSteps:
    """Runs a compiled model's ``train_step``, one or ``steps_per_call`` steps in one call.

    Args:
        model: a compiled Keras model with a distributed optimizer.
        steps_per_call: the most steps that one call may run.
        accumulate: micro-batches in a step.
        times: counts the steps and notes where their time goes.
        watch: told of losses and gradients; None: nobody looks at them.
        weighted: False where every part of every step counts the same, so that nothing is weighted.
        has_fillers: True where a rank may get a sample that counts for nothing.
        loss_sums: True where the losses sum over the batch: parts then count the same, but for fillers.
        skips_non_finite: True where a step may be skipped; its loss then stays out of the mean.
        jit_compile: True to have XLA compile the forward and backward pass.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        steps_per_call: int = 1,
        accumulate: int = 1,
        times: StepTimes | None = None,
        watch: GradientWatch | None = None,
        weighted: bool = True,
        has_fillers: bool = False,
        loss_sums: bool = False,
        skips_non_finite: bool = False,
        jit_compile: bool = False,
    ):
        self._model = model
        self._accumulate = accumulate
        self._watch = watch
        self._weighted = weighted
        self._has_fillers = has_fillers
        self._loss_sums = loss_sums
        self._part_weight: tf.Tensor | None = None
        self._loss: tf.Tensor | None = None
        self.jit_compile = jit_compile
        # Horovod's operations cannot stand inside a cluster compiled by XLA, which Keras chooses on a GPU.
        model.jit_compile = False
        model.steps_per_execution = 1
        model.make_test_function(force=True)
        # A step that is skipped has gone through BatchNormalization, whose statistics would keep its NaN:
        # they are put back to what they were when the step began.
        self._statistics: list[tuple[keras.Variable, tf.Variable]] = []
        if watch is not None and watch.applies is not None:
            weights = [v for v in model.non_trainable_weights if keras.backend.is_float_dtype(v.dtype)]
            self._statistics = [(each, tf.Variable(each.value, trainable=False)) for each in weights]
        self._weigh_and_watch(model.optimizer)
        if skips_non_finite:
            _leave_out_non_finite(model._loss_tracker)
        self.times = times or StepTimes(accumulate)
        self.steps_per_call = steps_per_call
        # One compiled function for calls of every length: a rank that completes a call which an error broke off has
        # to meet the others in theirs.
        self._is_single = steps_per_call * accumulate == 1
        self._iterator: Iterator[Any] | None = None
        self._run: Callable[..., Any] = self._run_one

    @property
    def steps_made(self) -> int:
        """Whole steps."""
        return self.times.micro_batches // self._accumulate

    def part_weight(self) -> tf.Tensor | None:
        """While a step is traced: what this rank's micro-batch counts for; None where all count the same."""
        return self._part_weight

    def _compile_for(self, iterator: Iterator[Any]) -> None:
        # The iterator is part of the function: to hand it over at each call takes Python as long as a small step.
        self._iterator = iterator
        self._run = self._compiled(partial(self._run_one if self._is_single else self._run_several, iterator))

    def train_alone(self) -> None:
        """From now on a rank's samples count the same in its steps, however many the other ranks have."""
        self._loss_sums = True
        self._iterator = None

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        return tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)

    def _weigh_and_watch(self, optimizer: Any) -> None:
        # A model that is trained a second time carries the hooks of the first: they are replaced.
        scale_loss, apply = getattr(optimizer, _ORIGINALS, (optimizer.scale_loss, optimizer.apply))
        setattr(optimizer, _ORIGINALS, (scale_loss, apply))

        def weigh_and_scale(loss: tf.Tensor) -> tf.Tensor:
            self._loss = loss
            if self._part_weight is not None:
                weight = self._part_weight > 0 if self._loss_sums else self._part_weight
                loss = loss * tf.cast(weight, loss.dtype)
            return scale_loss(loss)

        def apply_watched(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            if self._watch is not None:
                grads = self._watch.poison(self._loss, grads)
            apply(grads, trainable_variables)

        optimizer.scale_loss = weigh_and_scale
        optimizer.apply = apply_watched

    def _train_on_batch(self, data: Any, part_weight: tf.Tensor) -> None:
        model = self._model
        self._part_weight = part_weight if self._weighted else None
        self._loss = None
        applies = None if self._watch is None else self._watch.applies
        try:
            metrics = model.metrics_variables if self._has_fillers else []
            metrics_before = [tf.identity(variable.value) for variable in metrics]
            if applies is not None:
                is_first = self.times.begins_step()
                for variable, copy in self._statistics:
                    copy.assign(tf.where(is_first, variable.value, copy))
            self._train_step(data)
            _restore_unless(part_weight > 0, zip(metrics, metrics_before, strict=True))
            if applies is not None:
                _restore_unless(applies.read_value(), self._statistics)
            if self._weighted and self._loss is None:
                raise UsageError(
                    f"{type(model).__name__}.train_step must call self.optimizer.scale_loss(loss) before it takes the "
                    "gradient, for the last samples of an epoch are weighted there. Call it, or train with "
                    "remainder='drop'."
                )
        finally:
            self._part_weight = self._loss = None

    def _train_step(self, data: Any) -> None:
        if self.jit_compile:
            self._loss, update = compiled_train_step(self._model, data, lambda: self._loss)
            update()
        else:
            self._model.train_step(data)

    def _run_one(self, iterator: Iterator[Any]) -> None:
        data, part_weight = self.times.next_batch(iterator)
        # Where the iterator fails, nothing of the step may have happened: counters and random states
        # do not need the batch, and would otherwise move on ahead of the other ranks'.
        with tf.control_dependencies(tf.nest.flatten((data, part_weight), expand_composites=True)):
            self._train_on_batch(data, part_weight)
            # A step that raises is not to be counted: count after one of its updates.
            smallest = min(self._model.trainable_variables, key=lambda v: v.value.shape.num_elements(), default=None)
            with tf.control_dependencies([] if smallest is None else [smallest.value.read_value()]):
                self.times.end_micro_batch()

    def _run_several(self, iterator: Iterator[Any], batches: tf.Tensor) -> None:
        def body(done: tf.Tensor) -> list[tf.Tensor]:
            self._run_one(iterator)
            return [done + 1]

        tf.while_loop(lambda done: done < batches, body, [tf.constant(0)], parallel_iterations=1)

    def build(self, element_spec: Any, *, must: bool = False) -> None:
        """Makes the metrics' variables, without which the first step would be traced twice.

        Args:
            must: raise Keras's error where it cannot tell them from model and data; else the first step makes them.
        """
        try:
            data, _ = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), element_spec)
            self._model._symbolic_build(data_batch=data)
        except Exception:
            # A train_step of the user's own need not call the model as Keras would.
            if must or self._has_fillers:
                raise

    def train(self, iterator: Iterator[Any], steps: int) -> None:
        """Makes one call of at most ``steps_per_call`` steps.

        Args:
            iterator: of ``(data, part_weight)``, see :func:`hvdtrain.data.training_dataset`.
        """
        self._train(iterator, steps * self._accumulate)

    def complete(self, iterator: Iterator[Any], steps: int) -> None:
        """Makes the micro-batches that are missing from a call which should have reached ``steps`` steps in all."""
        self._train(iterator, steps * self._accumulate - self.times.micro_batches)

    def _train(self, iterator: Iterator[Any], micro_batches: int) -> None:
        if iterator is not self._iterator:
            self._compile_for(iterator)
        try:
            if self._is_single:
                self._run()
            else:
                self._run(tf.constant(micro_batches))
        except tf.errors.OpError as error:
            if self.jit_compile and is_uncompilable(error):
                told = next(line for line in str(error).splitlines() if "XLA" in line)
                raise UsageError(f"XLA cannot compile this model: {told}. Leave jit_compile out.") from error
            raise

    def evaluate(self, iterator: Iterator[Any]) -> None:
        """Updates the model's metrics with the iterator's next batch.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: there is none.
        """
        self._model.steps_per_execution = 1
        self._model.test_function(iterator)


def _restore_unless(condition: tf.Tensor, values: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
    for variable, value in values:
        variable.assign(tf.where(condition, variable.value, value))


def _leave_out_non_finite(loss_tracker: Any) -> None:
    update = type(loss_tracker).update_state.__get__(loss_tracker)

    def update_state(loss: tf.Tensor, sample_weight: Any = None) -> Any:
        finite = tf.math.is_finite(loss)
        weight = tf.cast(1 if sample_weight is None else sample_weight, loss.dtype)
        return update(tf.where(finite, loss, 0), sample_weight=tf.where(finite, weight, 0))

    loss_tracker.update_state = update_state
