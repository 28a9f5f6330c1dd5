"""The compiled evaluation step, and the metrics' variables that both steps need."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.optim.keras_calls import make_test_function
from hvdtrain.seams import keras_internals
from hvdtrain.training.returned_results import ReturnedResults


class EvalStep:
    """Runs a compiled model's ``test_step``."""

    def __init__(self, model: keras.Model):
        model.jit_compile = False
        model.steps_per_execution = 1
        self.returned = ReturnedResults()
        """What the model's ``test_step`` returns."""
        make_test_function(model, partial(self._run_step, model))
        self._function = model.test_function

    def run(self, iterator: Iterator[Any]) -> None:
        """Updates the model's metrics with the iterator's next batch.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: there is none.
        """
        self._function(iterator)

    def _run_step(self, model: keras.Model, step: Callable[[Any], Any], data: Any) -> Any:
        # Without a next batch, nothing may happen: Keras counts the batches of each output's loss.
        with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
            return self.returned.run(model, step, data)


def build_metrics(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of the model's metrics for what reads them before the first step.

    Args:
        element_spec: of ``(data, sample_weight)``, as the feed yields it.
    """
    data, _ = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), element_spec)
    before = keras_internals.BUILD_SHAPES.of(model)
    try:
        keras_internals.SYMBOLIC_BUILD.of(model)(data_batch=data)
    except Exception:
        # Keras has noted shapes to build the model with, though it could not be called: a saved one would not load.
        keras_internals.BUILD_SHAPES.set(model, before)
        raise
