"""Which metrics can be reduced over ranks: those whose state is a sum over samples."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.optim.keras_calls import observe_updates
from hvdtrain.seams import keras_internals

# Exact in float32 next to the values of most metrics, and far enough from them.
_OFFSET = 1024
_TOLERANCE = 1e-3
_RULE = "the state of a metric must consist of sums, which start at 0, to be summed over ranks."
_REMEDY = "Compute it in a callback, or write it as sums."


class SumCheck:
    """Checks, until one batch is conclusive, that updates add to a metric's state.

    A maximum, a moving average or the last value may start at 0 too.
    """

    def __init__(self, metric: keras.Metric):
        self.name = metric.name
        self._metric = metric
        self._is_decided = tf.Variable(False, trainable=False)
        self._is_violated = tf.Variable(False, trainable=False)
        observe_updates(metric, self._check)

    @property
    def is_violated(self) -> bool:
        return bool(self._is_violated.numpy())

    def _check(self, update: Any, *arguments: Any, **named: Any) -> None:
        def compare() -> tf.Tensor:
            from_zero = self._added(0, update, arguments, named)
            for offset in (_OFFSET, -_OFFSET):
                for plain, shifted in zip(from_zero, self._added(offset, update, arguments, named), strict=True):
                    differs = tf.abs(shifted - plain) > _TOLERANCE * (tf.abs(plain) + _OFFSET)
                    self._is_violated.assign(self._is_violated | tf.reduce_any(differs))
            shows = [tf.reduce_any(tf.abs(plain) > _TOLERANCE * _OFFSET) for plain in from_zero]
            self._is_decided.assign(self._is_violated | tf.reduce_all(shows))
            return tf.constant(True)

        tf.cond(self._is_decided.read_value(), lambda: tf.constant(True), compare)

    def _added(self, offset: int, update: Any, arguments: Any, named: Any) -> list[tf.Tensor]:
        """What an update adds to a state whose elements are all ``offset``."""
        variables = self._metric.variables
        before = [tf.cast(tf.fill(tuple(variable.shape), offset), variable.dtype) for variable in variables]
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            update(*arguments, **named)
            after = [scope.get_current_value(variable) for variable in variables]
        return [tf.cast(each, tf.float64) - offset for each in after]


def require_sums(model: keras.Model) -> bool:
    """Refuses metrics whose state is not a sum and cannot be summed over ranks; call it after a reset.

    Those with a user's own ``update_state`` are also checked at their first updates, see :func:`violations`.

    Returns:
        Whether such a check is new: steps must then be compiled again.

    Raises:
        UsageError: a metric's state does not start at 0.
    """
    for metric in model.metrics:
        for variable in metric.variables:
            if np.any(variable.numpy()):
                raise _another_start(metric, variable)
    unchecked = [metric for metric in _of_the_user(model) if "hvdtrain_sum_check" not in vars(metric)]
    for metric in unchecked:
        vars(metric)["hvdtrain_sum_check"] = SumCheck(metric)  # past Keras' __setattr__, which looks for variables
    return bool(unchecked)


def require_sums_from_the_start(model: keras.Model) -> None:
    """Refuses metrics of the user's whose state starts at another value than 0 when it is created.

    Keras creates the state of compiled metrics in the first step, after the reset at the begin of an epoch.

    Raises:
        UsageError: a metric's state does not start at 0.
    """
    for metric in _of_the_user(model):
        fresh = _made_again(metric)
        for variable in [] if fresh is None else fresh.variables:
            if np.any(variable.numpy()):
                raise _another_start(metric, variable)


def _made_again(metric: keras.Metric) -> keras.Metric | None:
    """Another metric of the same kind; None if it cannot be made."""
    for make in (lambda: type(metric).from_config(metric.get_config()), type(metric)):
        with contextlib.suppress(Exception):
            return make()
    return None


def _another_start(metric: keras.Metric, variable: keras.Variable) -> UsageError:
    return UsageError(
        f"{_RULE} Received: metric {metric.name!r}, whose variable {variable.path!r} starts at another value. {_REMEDY}"
    )


def violations(model: keras.Model) -> np.ndarray:
    """For each user-written metric, whether this rank has seen an update that does not add to its state."""
    return np.array([check.is_violated for check in _checks(model)], np.float32)


def require_none_violated(model: keras.Model, ranks: np.ndarray) -> None:
    """Raises the error of :func:`violations` summed over ranks.

    Raises:
        UsageError: the state of a metric is not a sum.
    """
    names = [check.name for check, count in zip(_checks(model), ranks, strict=True) if count]
    if names:
        raise UsageError(
            f"{_RULE} Received: metric {names[0]!r}, whose update depends on the state, like that of a maximum or a "
            f"moving average. {_REMEDY}"
        )


def _checks(model: keras.Model) -> list[SumCheck]:
    found = (vars(metric).get("hvdtrain_sum_check") for metric in _of_the_user(model))
    return [check for check in found if check is not None]


def _of_the_user(model: keras.Model) -> Sequence[keras.Metric]:
    """The metrics with an ``update_state`` that is not Keras'; all states of Keras' own metrics are sums."""
    # Those of compile() are part of model.metrics only when the first batch has built them.
    compiled = keras_internals.COMPILED_METRICS.of(model)
    declared = (
        []
        if compiled is None
        else [keras_internals.USER_METRICS.of(compiled), keras_internals.USER_WEIGHTED_METRICS.of(compiled)]
    )
    candidates = [each for each in keras.tree.flatten(declared) if isinstance(each, keras.Metric)]
    every = {id(metric): metric for metric in [*candidates, *model.metrics]}
    return [each for each in every.values() if not type(each).update_state.__module__.startswith("keras.")]
