"""``python -m hvdtrain eval``: loss and metrics of a run's checkpoints, once or as they appear."""

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.callbacks import RankCallbacks
from hvdtrain.checkpoint import newest_step
from hvdtrain.collectives import Collectives
from hvdtrain.config import EvalConfig
from hvdtrain.data import evaluation_dataset
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feed import EvaluationFeed
from hvdtrain.errors import DataError, HvdtrainError, StoppedEarly
from hvdtrain.evaluation import Evaluator
from hvdtrain.failure import JobWatch, on_first_rank
from hvdtrain.report import JsonLinesReporter, Reporter, SeveralReporters, console_reporter
from hvdtrain.session import run_on_ranks
from hvdtrain.steps import CompiledSteps
from hvdtrain.trained_run import TrainedRun, has_ended, open_run, run_folder
from hvdtrain.weight_average import keeps_average

_LOOK_EVERY_S = 2.0


def run(config: EvalConfig | None, refused: HvdtrainError | None) -> int:
    """Evaluates on all ranks, or tells every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(
        config, refused, start=lambda: runtime.init(threads=config.threads if config else None), work=_evaluate
    )


def _evaluate(config: EvalConfig, watch: JobWatch) -> None:
    collectives = runtime.current().collectives
    folder = run_folder(config.run_dir, config.task)
    trained = open_run(folder, config.data_dir)
    evaluator = _evaluator(trained, config.batch_size, watch)
    callbacks = RankCallbacks([], trained.model, collectives, epochs=1, steps_per_epoch=1)
    reporter = _reporter(folder, collectives)
    step = -1
    while not watch.check():
        newest = on_first_rank(lambda: newest_step(folder / "checkpoints"), collectives)
        if not config.watch or (newest is not None and newest > step):
            step = trained.load(config.checkpoint).step
            values = evaluator.run(callbacks, step)
            if values is not None:
                reporter.evaluated(step, values)
                if not config.watch:
                    return
        elif on_first_rank(partial(has_ended, folder, step), collectives):
            return
        else:
            watch.beat("waiting for a checkpoint", step)
            time.sleep(_LOOK_EVERY_S)
    raise StoppedEarly(f"stopped on {watch.stop_reason}, as asked")


def _evaluator(trained: TrainedRun, batch_size: int | None, watch: JobWatch) -> Evaluator:
    collectives = runtime.current().collectives
    if trained.data.evaluation is None:
        raise DataError(f"the task must have samples to evaluate on. Received: none of task {trained.config.task}")
    quota = BadSampleQuota(trained.config.bad_samples, collectives)
    quota.note_known(trained.data.evaluation.bad_samples)
    share = (trained.data.evaluation, batch_size or trained.config.batch_size or 1, collectives.rank, collectives.size)
    steps = CompiledSteps(trained.model)
    # Also on a rank that has no sample: its metrics have to have the variables of the others'.
    steps.build((evaluation_dataset(*share).element_spec, tf.TensorSpec([])), must=True)
    return Evaluator(
        trained.model,
        steps,
        EvaluationFeed(*share, quota),
        collectives,
        uses_average=keeps_average(trained.model.optimizer),
        shared=nullcontext,
        watch=watch,
    )


def _reporter(folder: Path, collectives: Collectives) -> Reporter:
    """Rank 0 tells, and keeps what it tells beside what the run itself writes."""
    if collectives.rank != 0:
        return Reporter()
    lines = JsonLinesReporter(folder / "evaluations.jsonl")
    return SeveralReporters([console_reporter(is_terminal=False), lines])
