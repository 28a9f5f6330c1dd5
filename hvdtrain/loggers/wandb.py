"""Logs a run to Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.tracking import TrackingReporter


class WandbReporter(TrackingReporter):
    """Logs to Weights & Biases, in the background. Requires ``pip install hvdtrain[wandb]``.

    Its own environment variables apply: ``WANDB_PROJECT``, ``WANDB_API_KEY``, and ``WANDB_MODE=offline`` for machines
    without internet, which writes to the run directory's folder ``wandb`` (``wandb sync`` uploads it later).

    Args:
        run_dir: an existing folder, whose name becomes that of the run.
        config: the run's options by name.
        project: the project (default: ``WANDB_PROJECT``, else Weights & Biases' ``uncategorized``).
    """

    tracker = "wandb"

    def __init__(self, run_dir: Path | str, config: Mapping[str, Any] | None = None, *, project: str | None = None):
        super().__init__(run_dir, config)
        self._project = project

    def _open(self, run_id: str | None) -> str:
        import wandb

        self._run = wandb.init(
            project=self._project,
            dir=self._run_dir,
            name=self._run_dir.name,
            id=run_id,
            resume="allow",
            config=self._config,
            settings=wandb.Settings(silent=True),
        )
        # Its own counter refuses steps before the last one, which a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def _finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=1 if summary is None else 0)
