"""Horovod's MetricAverageCallback for Keras 3, exact: the sums behind metrics are reduced, not their values."""

from typing import Any

import keras
import numpy as np

from hvdtrain.distributed import runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.training.metric_state import require_none_violated, require_sums, violations
from hvdtrain.training.metrics import results_of, sums


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's values, ``val_…`` included, with those over the samples of all ranks.

    Callbacks after it in the list receive these values, and so does ``model.fit``'s history. Values that ``train_step``
    returns under a name that no metric has are averaged over ranks instead, which is exact if all ranks train on
    equally many samples.

    Args:
        collectives: the ranks that train together (default: those of ``hvdtrain.init()``).
    """

    averages_values = True

    def __init__(self, collectives: Collectives | None = None):
        super().__init__()
        self._collectives = collectives or runtime.current().collectives
        self._is_in_epoch = False
        self._training: list[np.ndarray] | None = None

    @property
    def has_validated(self) -> bool:
        """Whether a validation has begun in this epoch."""
        return self._training is not None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if require_sums(self.model):
            self.model.make_train_function(force=True)
            self.model.make_test_function(force=True)
        self._is_in_epoch, self._training = True, None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # The validation resets the metrics next.
        if self._is_in_epoch:
            self._training = sums(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_in_epoch = False
        if logs is not None:
            logs.update(self._over_ranks(logs, "values at the end of an epoch"))

    def evaluation_begins(self) -> None:
        """Before an evaluation outside of training; all ranks must call it."""
        self.model.reset_metrics()
        if require_sums(self.model):
            self.model.make_test_function(force=True)
        self._training = None

    def evaluated(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The values of such an evaluation over all ranks; all ranks must call it."""
        return {**logs, **self._over_ranks(logs, "values of model.evaluate")}

    def batch_values(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The values of the epoch so far over all ranks; all ranks must call it."""
        results = results_of(self.model, self._collectives.sum(sums(self.model)))
        return {name: value for name, value in results.items() if name in logs}

    def _over_ranks(self, logs: dict[str, Any], what: str) -> dict[str, Any]:
        # Without this, ranks that reduce different values would wait for each other.
        require_agreement(what, {"values": sorted(logs)}, self._collectives)
        state = {"": sums(self.model)} if self._training is None else {"": self._training, "val_": sums(self.model)}
        found = {f"{prefix}{name}": 0 for prefix, local in state.items() for name in results_of(self.model, local)}
        others = sorted(name for name, value in logs.items() if name not in found and isinstance(value, float | int))
        flat = [array for local in state.values() for array in local]
        *totals, means, violated = self._collectives.sum(
            [*flat, np.array([logs[name] for name in others], np.float64), violations(self.model)]
        )
        require_none_violated(self.model, violated)
        values = dict(zip(others, (means / self._collectives.size).tolist(), strict=True))
        for prefix, local in state.items():
            results = results_of(self.model, totals[: len(local)])
            values |= {f"{prefix}{name}": value for name, value in results.items() if f"{prefix}{name}" in logs}
            totals = totals[len(local) :]
        return values
