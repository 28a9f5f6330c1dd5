"""The compiled train and evaluation step: Keras' own, run several at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

Logs = dict[str, tf.Tensor]


class CompiledSteps:
    """Runs a compiled model's ``train_step``, one or ``steps_per_call`` steps in one call.

    Args:
        model: a compiled Keras model.
        steps_per_call: the most steps that one call may run.
        accumulate: micro-batches in a step.
    """

    def __init__(self, model: keras.Model, *, steps_per_call: int, accumulate: int):
        self._model = model
        self._accumulate = accumulate
        # Horovod's operations cannot stand inside a cluster compiled by XLA, which Keras chooses on a GPU.
        model.jit_compile = False
        self._one = self._make_train_function(1)
        self._many = self._one if steps_per_call == 1 else self._make_train_function(steps_per_call)
        self.steps_per_call = steps_per_call
        model.steps_per_execution = 1
        model.make_test_function(force=True)

    def _make_train_function(self, steps: int) -> Callable[[Iterator[Any]], Logs]:
        # Keras reads the number while it traces, on the first call: each function sets its own.
        batches = steps * self._accumulate
        self._model.steps_per_execution = batches
        self._model.make_train_function(force=True)
        function = self._model.train_function

        def run(iterator: Iterator[Any]) -> Logs:
            self._model.steps_per_execution = batches
            return function(iterator)

        return run

    def train(self, iterator: Iterator[Any], max_steps: int) -> tuple[int, Logs]:
        """Makes one call of at most ``max_steps`` steps.

        Returns:
            The number of steps made, and the metrics so far as Keras gives them: of this rank alone.
        """
        if max_steps >= self.steps_per_call:
            return self.steps_per_call, self._many(iterator)
        return 1, self._one(iterator)

    def evaluate(self, dataset: tf.data.Dataset) -> None:
        """Updates the model's metrics, reset first, with each batch of the dataset."""
        self._model.reset_metrics()
        self._model.steps_per_execution = 1
        iterator = iter(dataset)
        while True:
            try:
                self._model.test_function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return
