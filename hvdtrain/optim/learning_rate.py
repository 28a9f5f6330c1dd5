"""The learning rate over a run: scaled to the number of ranks, warmed up, decayed."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.seams import keras_internals


def scaled_learning_rate(learning_rate: float, scaling: str, num_ranks: int) -> float:
    """The rate for a batch that is ``num_ranks`` times as large.

    Source: ``linear``: Goyal et al., arXiv:1706.02677; ``sqrt``: Krizhevsky, arXiv:1404.5997.
    """
    return learning_rate * {"linear": num_ranks, "sqrt": math.sqrt(num_ranks), "none": 1}[scaling]


@keras.saving.register_keras_serializable(package="hvdtrain")
class WarmUpThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to ``peak`` over the first steps, then decays.

    Args:
        peak: the learning rate after warm-up.
        warmup_steps: step ``i`` (from 0) of these uses ``peak * (i + 1) / warmup_steps``.
        decay: ``none``; ``exponential``: times ``decay_rate`` every ``decay_steps`` steps, in a
            staircase; ``cosine``: from ``peak`` to 0 between warm-up and ``total_steps``.
        micro_batches_per_step: Keras counts micro-batches; the schedule counts steps.
    """

    def __init__(
        self,
        peak: float,
        *,
        warmup_steps: int,
        decay: str,
        decay_rate: float,
        decay_steps: int,
        total_steps: int,
        micro_batches_per_step: int,
    ):
        self._config: dict[str, Any] = {
            "peak": peak,
            "warmup_steps": warmup_steps,
            "decay": decay,
            "decay_rate": decay_rate,
            "decay_steps": decay_steps,
            "total_steps": total_steps,
            "micro_batches_per_step": micro_batches_per_step,
        }

    def __call__(self, step: Any) -> tf.Tensor:
        c = self._config
        step = tf.cast(tf.cast(step, tf.int64) // c["micro_batches_per_step"], tf.float32)
        factor = tf.ones_like(step)
        if c["decay"] == "exponential":
            factor = c["decay_rate"] ** tf.floor(step / c["decay_steps"])
        elif c["decay"] == "cosine":
            decaying_steps = max(1, c["total_steps"] - c["warmup_steps"])
            done = tf.clip_by_value((step - c["warmup_steps"]) / decaying_steps, 0.0, 1.0)
            factor = 0.5 * (1 + tf.cos(math.pi * done))
        if c["warmup_steps"]:
            factor *= tf.minimum((step + 1) / c["warmup_steps"], 1.0)
        return c["peak"] * factor

    def get_config(self) -> dict[str, Any]:
        return dict(self._config)


def follow_steps(optimizer: keras.optimizers.Optimizer, step: tf.Variable) -> Callable[[], None]:
    """Makes a schedule follow the steps of a run that updates the weights more often than once a step.

    Args:
        optimizer: one that applies gradients; without a schedule, nothing changes.
        step: the number of steps made, int64.

    Returns:
        A function that makes it follow the updates again.
    """
    schedule = keras_internals.LEARNING_RATE.of(optimizer)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return lambda: None
    # Past Keras' __setattr__, which looks for variables.
    current = keras_internals.CURRENT_LEARNING_RATE
    current.of(optimizer)
    vars(optimizer)[current.name] = lambda: schedule(step)
    return lambda: vars(optimizer).pop(current.name, None)


def hold_weights(model: keras.Model) -> None:
    """Makes the steps of a model compute what they did, but hardly change its weights; call it before the first.

    For measurements: with its own learning rate, a model may diverge, and the steps that are measured would not be
    made. The rate is not 0, by which some optimizers divide.
    """
    for leaf in leaves_of(model):
        rate = keras_internals.LEARNING_RATE.of(leaf)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            leaf.learning_rate = _Scaled(rate)
        elif isinstance(rate, keras.Variable):
            rate.assign(_HELD * rate)
        else:
            leaf.learning_rate = functools.partial(_scaled, rate)


_HELD = 1e-12
"""What :func:`hold_weights` multiplies learning rates by."""


class _Scaled(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule whose learning rates are multiplied by ``_HELD``."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule):
        self._schedule = schedule

    def __call__(self, step: Any) -> tf.Tensor:
        return _HELD * self._schedule(step)

    def get_config(self) -> dict[str, Any]:
        return {"schedule": self._schedule}


def _scaled(rate: Callable[[], Any]) -> Any:
    return _HELD * rate()
