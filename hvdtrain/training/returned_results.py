"""What a model's own ``train_step`` or ``test_step`` returns, and under which names: Keras logs that."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.optim.keras_calls import recorded_results


class ReturnedResults:
    """Computes the results that a step returns from the state of metrics over all ranks.

    A value that is not a metric's result is the last step's, averaged over ranks.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[keras.Metric, str | None]] = {}
        """The metric behind each name, and the name within its results if they are several."""
        self._last: dict[str, tf.Variable] = {}

    def run(self, model: keras.Model, step: Callable[[Any], Any], data: Any) -> Any:
        """Runs a step and records what it returns; call it while the step is traced."""
        with recorded_results(model) as recorded:
            returned = step(data)
        self._metrics = {}
        for name, value in _flat(returned).items():
            source = next(((metric, key) for metric, key, result in recorded if result is value), None)
            if source is not None:
                self._metrics[name] = source
            elif keras.ops.is_tensor(value) and keras.ops.ndim(value) == 0:
                self._record_last(name, value)
        return returned

    def _record_last(self, name: str, value: Any) -> None:
        if name not in self._last:
            with outside_of_step(), tf.device("CPU"):
                self._last[name] = tf.Variable(0.0, trainable=False)
        self._last[name].assign(tf.cast(value, tf.float32))

    def last(self) -> np.ndarray:
        """This rank's values that are not results of metrics; float32, one-dimensional."""
        return np.array([variable.numpy() for variable in self._last.values()], np.float32)

    def results(self, model: keras.Model, last: np.ndarray) -> dict[str, Any]:
        """What the step returns, from the current state of the metrics; all metrics if it returned nothing.

        Args:
            last: as :meth:`last`, averaged over ranks.
        """
        if not self._metrics and not self._last:
            return model.get_metrics_result()
        found = {id(metric): metric.result() for metric, _ in self._metrics.values()}
        results = {
            name: found[id(metric)] if key is None else found[id(metric)][key]
            for name, (metric, key) in self._metrics.items()
        }
        return {**results, **dict(zip(self._last, last, strict=True))}


def _flat(returned: Any) -> dict[str, Any]:
    """Values by name; as in Keras, those of a nested dict under their own names."""
    found: dict[str, Any] = {}
    for name, value in returned.items() if isinstance(returned, dict) else ():
        found |= value if isinstance(value, dict) else {name: value}
    return found
