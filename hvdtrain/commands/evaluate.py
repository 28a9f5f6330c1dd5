"""``python -m hvdtrain eval``: loss and metrics of a run's checkpoints, once or as they appear."""

import time
from contextlib import nullcontext
from functools import partial

import tensorflow as tf

from hvdtrain.checkpoint.folders import open_folder
from hvdtrain.commands.config import EvalConfig
from hvdtrain.commands.session import Session, run_on_ranks
from hvdtrain.commands.trained_run import TrainedRun, has_ended, open_run
from hvdtrain.data import evaluation_dataset
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import EvaluationFeed
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import DataError, HvdtrainError, StoppedEarly
from hvdtrain.fault_tolerance.collective_errors import on_first_rank
from hvdtrain.loggers.json_lines import JsonLinesReporter
from hvdtrain.loggers.progress_bar import console_reporter
from hvdtrain.loggers.reporter import CompositeReporter, Reporter, RunShape
from hvdtrain.optim.ema import keeps_ema
from hvdtrain.runs.run_files import EVALUATIONS, RunFiles, open_run_files
from hvdtrain.tasks.names import run_dir_of
from hvdtrain.training.callbacks import NoCallbacks
from hvdtrain.training.eval_step import build_metrics
from hvdtrain.training.evaluator import Evaluator
from hvdtrain.training.metrics import single_numbers

_POLL_EVERY_S = 2.0


def run(config: EvalConfig | None, refused: HvdtrainError | None) -> int:
    """Evaluates on all ranks, or reports on every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(config, refused, _evaluate)


def _evaluate(config: EvalConfig, session: Session) -> None:
    with open_run_files(run_dir_of(config.run_dir, config.task)) as files:
        _evaluate_run(config, files, session)


def _evaluate_run(config: EvalConfig, files: RunFiles, session: Session) -> None:
    collectives, job_watch = session.collectives, session.job_watch
    trained = open_run(files, config.task, config.data_dir, collectives)
    evaluator = _make_evaluator(trained, config.batch_size, session)
    reporter = _make_reporter(files, trained.config.task, collectives)
    step = -1
    while not job_watch.check():
        newest = on_first_rank(lambda: open_folder(files.checkpoints).newest_step(), collectives)
        if not config.watch or (newest is not None and newest > step):
            step = trained.load(config.checkpoint).step
            values = evaluator.run(NoCallbacks(), step)
            if values is not None:
                reporter.evaluated(step, single_numbers(values))
                if collectives.rank == 0:
                    files.upload(EVALUATIONS)
                if not config.watch:
                    return
        elif on_first_rank(partial(_has_ended, files, step), collectives):
            return
        else:
            job_watch.heartbeat("waiting for a checkpoint", step)
            time.sleep(_POLL_EVERY_S)
    raise StoppedEarly(f"stopped on {job_watch.stop_reason}, as requested")


def _has_ended(files: RunFiles, step: int) -> bool:
    return has_ended(files.path_of("summary.json"), step)


def _make_evaluator(trained: TrainedRun, batch_size: int | None, session: Session) -> Evaluator:
    collectives, training = session.collectives, trained.config.training
    source = trained.data.evaluation
    if source is None:
        raise DataError(f"the task must have samples to evaluate on. Received: none of task {trained.config.task}")
    quota = BadSampleQuota(training.guards.bad_samples, collectives)
    quota.note_known(source.bad_samples)
    batch_size = batch_size or training.batch_size
    dataset = evaluation_dataset(source, batch_size, collectives.rank, collectives.size)
    # Also on a rank that has no sample: its metrics must have the same variables as the others'.
    build_metrics(trained.model, (dataset.element_spec, tf.TensorSpec([])))
    return Evaluator(
        trained.model,
        EvaluationFeed(source, batch_size, collectives, quota),
        collectives,
        uses_ema=keeps_ema(trained.model),
        synchronized=nullcontext,
        job_watch=session.job_watch,
    )


def _make_reporter(files: RunFiles, task: str, collectives: Collectives) -> Reporter:
    """Reports on rank 0: to the console and to a file beside those of the run."""
    if collectives.rank != 0:
        return Reporter()
    lines = JsonLinesReporter(files.path_of(EVALUATIONS))
    console = console_reporter(is_terminal=False)
    console.started({"run": f"{files.name} (task {task}), evaluated on {collectives.size} rank(s)"}, RunShape(1, 1))
    return CompositeReporter([console, lines])
