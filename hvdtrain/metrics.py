"""Metrics over all ranks: the sums behind them are reduced, not the ratios."""

from typing import Any

import keras
import numpy as np

from hvdtrain.collectives import Collectives
from hvdtrain.errors import UsageError


def reduced_results(model: keras.Model, collectives: Collectives) -> dict[str, float]:
    """The model's loss and metrics over what every rank has seen since they were last reset.

    Exact on uneven shards, also for metrics with vector state such as AUC: the state of a Keras
    metric is made of sums. This rank's own state is left as it was. Every rank has to call it.
    """
    results = results_of_all(model, collectives, is_whole=True)
    assert results is not None
    return results


def results_of_all(model: keras.Model, collectives: Collectives, *, is_whole: bool) -> dict[str, float] | None:
    """As :func:`reduced_results`; None where a rank says that it has not seen all that it should have."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    local = [variable.numpy() for variable in variables]
    # In one message, for the time of a small one is all latency.
    *totals, num_whole = collectives.sum([*local, np.array(is_whole, np.float32)])
    with keras.StatelessScope(state_mapping=list(zip(variables, totals, strict=True))):
        results = {name: float(value) for name, value in _scalars(model.get_metrics_result()).items()}
    return results if num_whole == collectives.size else None


def require_sums(model: keras.Model) -> None:
    """Refuses metrics whose state is no sum, which cannot be added up over ranks; call it after a reset.

    Raises:
        UsageError: a metric's state does not start at 0.
    """
    for metric in model.metrics:
        for variable in metric.variables:
            if np.any(variable.numpy()):
                raise UsageError(
                    f"the state of a metric must be sums, which start at 0, to be added up over ranks. Received: "
                    f"metric {metric.name!r}, whose variable {variable.path!r} starts at another value. Compute it in "
                    "a callback, or write it as sums."
                )


class LossSince:
    """Adds up what a model's own loss was over the steps since it was last asked, on this rank alone."""

    def __init__(self, model: keras.Model):
        self._tracker = model._loss_tracker
        self._total = self._count = 0.0

    def mean(self) -> float:
        """The mean; 0 where there was no step."""
        total, count = float(self._tracker.total.numpy()), float(self._tracker.count.numpy())
        if count < self._count:  # An epoch has begun, and the tracker anew.
            self._total = self._count = 0.0
        samples, losses = count - self._count, total - self._total
        self._total, self._count = total, count
        return losses / samples if samples else 0.0


def _scalars(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if keras.ops.ndim(value) == 0}
