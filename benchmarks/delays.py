"""Ranks of different speed, and the loss over time: parts of models and callbacks for benchmarks."""

import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Delay(layers.Layer):
    """Sleeps for each sample, to simulate a slower processor, and longer in some micro-batches.

    Args:
        hold_ups: the share of micro-batches that take ``hold_up_s`` longer.
    """

    def __init__(self, seconds_per_sample: float, hold_ups: float, hold_up_s: float):
        super().__init__()
        self._seconds_per_sample = seconds_per_sample
        self._hold_ups = hold_ups
        self._hold_up_s = hold_up_s
        self._random = np.random.default_rng()
        self._num_calls = self._held_up = 0
        self.step_ends_s: list[float] = []
        self.at_step: dict[int, Callable[[], None]] = {}
        """What to call when so many micro-batches are made."""

    def _wait(self, x: np.ndarray) -> np.ndarray:
        time.sleep(len(x) * self._seconds_per_sample + self._is_held_up() * self._hold_up_s)
        self.step_ends_s.append(time.time())
        self.at_step.pop(len(self.step_ends_s), lambda: None)()
        return x

    def _is_held_up(self) -> bool:
        """In each block of micro-batches, one at random: independent draws would differ too much between runs."""
        if not self._hold_ups:
            return False
        place = self._num_calls % round(1 / self._hold_ups)
        if place == 0:
            self._held_up = self._random.integers(round(1 / self._hold_ups))
        self._num_calls += 1
        return bool(place == self._held_up)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return inputs
        return tf.ensure_shape(tf.numpy_function(self._wait, [inputs], inputs.dtype), inputs.shape)


class Curve(keras.callbacks.Callback):
    """Records the loss over all ranks at each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[list[float]] = []

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self.points.append([time.time(), (logs or {})["loss"]])


class WeightsOverTime:
    """Keeps a model's weights at some moments, to be evaluated later.

    Evaluations during training, and callbacks at batches, would wait for all ranks.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._kept: list[tuple[float, list[np.ndarray]]] = []

    def keep(self) -> None:
        self._kept.append((time.time(), self._model.get_weights()))

    def losses(self, x: np.ndarray, y: np.ndarray) -> list[list[float]]:
        """Pairs of a moment and the loss with the weights of then."""
        points = []
        for moment, weights in self._kept:
            self._model.set_weights(weights)
            loss, *_ = self._model.evaluate(x, y, batch_size=len(x), verbose=0)
            points.append([moment, loss])
        return points
