"""Metrics over all ranks: the sums behind them are reduced, not the ratios."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.seams import keras_internals
from hvdtrain.system.background import BackgroundTask
from hvdtrain.training.metric_state import require_none_violated, violations
from hvdtrain.training.returned_results import ReturnedResults


def reduced_results(
    model: keras.Model, collectives: Collectives, returned: ReturnedResults | None = None
) -> dict[str, Any]:
    """The model's loss and metrics over the samples of all ranks since they were last reset.

    Exact on uneven shards, also for metrics with vector state such as AUC: the state of a Keras
    metric consists of sums. This rank's own state is unchanged. All ranks must call it.

    Args:
        returned: by the model's own step (default: all metrics).

    Returns:
        By name, numbers, or lists of numbers for metrics such as ``F1Score(average=None)``.
    """
    results = results_if_complete(model, collectives, is_complete=True, returned=returned)
    assert results is not None
    return results


def results_if_complete(
    model: keras.Model, collectives: Collectives, *, is_complete: bool, returned: ReturnedResults | None = None
) -> dict[str, Any] | None:
    """As :func:`reduced_results`; None if a rank says that its share is not complete.

    Raises:
        UsageError: on every rank: the state of a metric is not a sum.
    """
    returned = returned or ReturnedResults()
    # In one allreduce: a small one takes only latency.
    totals = collectives.sum([*_own_sums(model, returned), np.array(is_complete, np.float32)])
    if totals.pop() < collectives.size:
        return None
    return _results_of_all(model, returned, totals, collectives.size)


class ResultsInBackground:
    """As :func:`reduced_results`, of the steps made so far, while ranks continue to train.

    All ranks must construct it, in the same order, each when the one before is done.
    """

    def __init__(self, model: keras.Model, collectives: Collectives, returned: ReturnedResults):
        self._model = model
        self._returned = returned
        self._size = collectives.size
        own = [tf.constant(each) for each in _own_sums(model, returned)]
        self._totals = BackgroundTask(lambda: collectives.sum_tensors(own, "hvdtrain_results"), "results")

    @property
    def is_done(self) -> bool:
        return self._totals.is_done

    @property
    def has_failed(self) -> bool:
        """Whether a rank was lost; waits for the others."""
        return self._totals.has_failed

    def results(self) -> dict[str, Any]:
        """The results; waits for them."""
        totals = [each.numpy() for each in self._totals.result()]
        return _results_of_all(self._model, self._returned, totals, self._size)


def _own_sums(model: keras.Model, returned: ReturnedResults) -> list[np.ndarray]:
    """What is summed over ranks, of this rank's samples."""
    return [*sums(model), returned.last(), violations(model)]


def _results_of_all(
    model: keras.Model, returned: ReturnedResults, totals: Sequence[np.ndarray], size: int
) -> dict[str, Any]:
    """The results from what :func:`_own_sums` returns, summed over ``size`` ranks."""
    *state, last, violated = totals
    require_none_violated(model, violated)
    found = results_of(model, state, lambda: returned.results(model, last / size))
    return {name: value if np.ndim(value) == 0 else value.tolist() for name, value in found.items()}


def single_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of results, for reporters: those of a list ``f1_score`` are ``f1_score_0``, ``f1_score_1``, ….

    The elements of a matrix are numbered row by row.
    """
    numbers = {}
    for name, value in results.items():
        if np.ndim(value) == 0:
            numbers[name] = value
        else:
            numbers |= {f"{name}_{i}": each for i, each in enumerate(np.ravel(value).tolist())}
    return numbers


def sums(model: keras.Model) -> list[np.ndarray]:
    """The state of the model's metrics on this rank."""
    return [variable.numpy() for metric in model.metrics for variable in metric.variables]


def results_of(
    model: keras.Model, state: Sequence[np.ndarray], compute: Callable[[], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Loss and metrics computed from a state such as that of :func:`sums`: numbers, or arrays."""
    compute = compute or model.get_metrics_result
    variables = [variable for metric in model.metrics for variable in metric.variables]
    with keras.StatelessScope(state_mapping=list(zip(variables, state, strict=True))):
        results = {name: keras.ops.convert_to_numpy(value) for name, value in compute().items()}
    return {name: float(value) if value.ndim == 0 else value for name, value in results.items()}


class LossOfSteps:
    """The mean of a model's own loss over the steps since :meth:`begin`, on this rank alone."""

    def __init__(self, model: keras.Model):
        self._tracker = keras_internals.LOSS_TRACKER.of(model)
        self._begin = 0.0, 0.0

    def begin(self) -> None:
        """Call it after the metrics were reset or restored, if they are, and before the steps."""
        self._begin = self._sums()

    def mean(self) -> float:
        """The mean; 0 if there was no step."""
        (total, count), (total_before, count_before) = self._sums(), self._begin
        return (total - total_before) / (count - count_before) if count > count_before else 0.0

    def _sums(self) -> tuple[float, float]:
        return float(self._tracker.total.numpy()), float(self._tracker.count.numpy())
