"""``python -m hvdtrain predict``: the predictions of a run's model, as a file."""

import contextlib
from pathlib import Path

from hvdtrain.commands.config import PredictConfig
from hvdtrain.commands.session import Session, run_on_ranks
from hvdtrain.commands.trained_run import TrainedRun, open_run
from hvdtrain.data import Source
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.errors import DataError, HvdtrainError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.optim.ema import keep_ema_weights
from hvdtrain.runs.run_files import open_run_files
from hvdtrain.stores.local_copies import reading_folder
from hvdtrain.stores.store import Store
from hvdtrain.stores.urls import is_url
from hvdtrain.tasks.names import run_dir_of
from hvdtrain.training.prediction import write_predictions
from hvdtrain.training.prediction_files import require_format


def run(config: PredictConfig | None, refused: HvdtrainError | None) -> int:
    """Predicts on all ranks, or reports on every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(config, refused, _predict)


def _predict(config: PredictConfig, session: Session) -> None:
    collectives = session.collectives
    on_every_rank(lambda: _require_output(config.output), collectives)
    with open_run_files(run_dir_of(config.run_dir, config.task)) as files:
        trained = open_run(files, config.task, config.data_dir, collectives)
        restored = trained.load(config.checkpoint)
    source = on_every_rank(lambda: _samples(trained, config.split), collectives)
    BadSampleQuota(0, collectives).note_known(source.bad_samples)
    keep_ema_weights(trained.model)

    def heartbeat() -> None:
        if session.job_watch.stop_requested:
            raise StoppedEarly(f"stopped on {session.job_watch.stop_reason}, as requested. Nothing was written.")
        session.job_watch.heartbeat("prediction", restored.step)

    with contextlib.ExitStack() as stack:
        is_stored = is_url(config.output)
        path = stack.enter_context(reading_folder()) / Path(config.output).name if is_stored else Path(config.output)
        write_predictions(
            trained.model,
            source,
            path,
            batch_size=config.batch_size or trained.config.training.batch_size,
            collectives=collectives,
            on_batch=heartbeat,
        )
        if is_stored:
            on_first_rank(lambda: Store(config.output).upload(path, ""), collectives)
    if collectives.rank == 0:
        with contextlib.suppress(OSError):  # The file has been written, even if this line cannot be.
            print(f"{config.output}: {source.num_samples} predictions of step {restored.step}", flush=True)


def _require_output(output: str) -> None:
    if not output:
        raise UsageError("predict needs --output, a file that ends in .npy, .csv or .parquet. Received: none.")
    require_format(Path(output))


def _samples(trained: TrainedRun, split: str) -> Source:
    source = trained.data.evaluation if split == "evaluation" else trained.data.training
    if source is None:
        raise DataError(
            f"--split must name samples that the task has. Received: evaluation, which task {trained.config.task} has "
            "not. Use --split training."
        )
    return source
