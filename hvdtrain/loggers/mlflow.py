"""Logs a run to MLflow."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.tracking import TrackingReporter

_MAX_PARAMETER_CHARACTERS = 6000  # MLflow's limit
_MAX_PARAMETERS_AT_ONCE = 100  # MLflow's limit


class MLflowReporter(TrackingReporter):
    """Logs to MLflow, in the background. Requires ``pip install hvdtrain[mlflow]``.

    MLflow's own environment variables choose the server (``MLFLOW_TRACKING_URI``, by default the file ``mlflow.db`` of
    the working directory) and the experiment (``MLFLOW_EXPERIMENT_NAME``).

    Args:
        run_dir: an existing folder, whose name becomes that of the run.
        config: the run's options by name, logged as parameters.
        experiment: the experiment, created if it is missing (default: ``MLFLOW_EXPERIMENT_NAME``, else MLflow's
            ``Default``).
    """

    tracker = "mlflow"

    def __init__(self, run_dir: Path | str, config: Mapping[str, Any] | None = None, *, experiment: str | None = None):
        super().__init__(run_dir, config)
        self._experiment = experiment
        self._sent: list[Any] = []

    def _open(self, run_id: str | None) -> str:
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        self._client = mlflow.MlflowClient()
        if run_id is None:
            name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or "Default"
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
            run_id = self._client.create_run(experiment_id, run_name=self._run_dir.name).info.run_id
            parameters = [
                mlflow.entities.Param(name, str(value)[:_MAX_PARAMETER_CHARACTERS])
                for name, value in self._config.items()
            ]
            for i in range(0, len(parameters), _MAX_PARAMETERS_AT_ONCE):
                self._client.log_batch(run_id, params=parameters[i : i + _MAX_PARAMETERS_AT_ONCE])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return run_id

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._sent.append(self._client.log_batch(self._run_id, metrics=metrics, synchronous=False))

    def _finish(self, summary: Mapping[str, Any] | None) -> None:
        try:
            for each in self._sent:
                each.wait()
        finally:
            self._sent.clear()
            for name, value in (summary or {}).items():
                if isinstance(value, str):
                    self._client.set_tag(self._run_id, name, value)
                elif isinstance(value, int | float) and math.isfinite(value):
                    self._client.log_metric(self._run_id, f"summary/{name}", value)
            self._client.set_terminated(self._run_id, "FAILED" if summary is None else "FINISHED")
