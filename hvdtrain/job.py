"""One training job from its configuration: task, model, trainer, run directory, in this order."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from hvdtrain import gpus, process, runtime
from hvdtrain.averaging import LocalTraining
from hvdtrain.bench import autotune
from hvdtrain.bench.cases import make_trainer
from hvdtrain.building import (
    compile_plainly,
    make_model,
    peak_learning_rate,
    read_task,
    total_steps,
    with_task_defaults,
)
from hvdtrain.checkpoint import RESUME, Checkpointer
from hvdtrain.config import LEARNING, LOCAL, RANKS, WHAT, TrainConfig, flag_of, options
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.failure import JobWatch, on_every_rank, on_first_rank
from hvdtrain.report import RunShape
from hvdtrain.run_directory import RunDirectory, open_run_directory
from hvdtrain.session import OWN_TO_A_RANK, run_on_ranks
from hvdtrain.supervised import note_listener
from hvdtrain.tasks import Data, Task, short_name
from hvdtrain.timing.profiler import Profiler
from hvdtrain.trained_run import run_folder
from hvdtrain.trainer import Trainer

# Decide what a run comes to. The others may be changed where one goes on.
_DECIDING = (WHAT, LEARNING, RANKS, LOCAL)


def run(config: TrainConfig | None, refused: HvdtrainError | None) -> int:
    """Trains, or tells every rank why this one cannot.

    Args:
        config: None where this rank's command line was refused.
        refused: why.

    Returns:
        The exit code.
    """
    trainer: Trainer | None = None

    def start() -> None:
        runtime.init(
            threads=config.threads if config else None,
            deterministic=config.deterministic if config else False,
            timeline=config.timeline if config else None,
            process_groups=config is not None and config.average_across == "host",
        )

    def work(asked: TrainConfig, watch: JobWatch) -> None:
        nonlocal trainer
        collectives = runtime.current().collectives
        if collectives.rank == 0:
            note_listener()
        runtime.init(seed=asked.seed)
        task, data = on_every_rank(lambda: read_task(asked), collectives)
        config = on_every_rank(lambda: with_task_defaults(asked, task), collectives)
        if process.restart_number():
            # A job that died goes on from its own last checkpoint, whatever it began with.
            config = dataclasses.replace(config, resume="auto")
        if config.autotune:
            config = _tuned(config, task, data, watch)
        path = run_folder(config.run_dir, config.task)
        run_directory = open_run_directory(collectives.rank, path)
        try:
            trainer = on_every_rank(lambda: _make_trainer(config, task, data, run_directory, path, watch), collectives)
            on_every_rank(lambda: run_directory.claim(config.resume), collectives)
            if on_first_rank(lambda: _is_complete(config, run_directory, path, trainer.total_steps), collectives):
                run_directory.reporter.complete(trainer.total_steps, path)
            else:
                _train(config, task, trainer, run_directory)
        finally:
            run_directory.reporter.close()

    return run_on_ranks(config, refused, start, work, step=lambda: None if trainer is None else trainer.step)


def _tuned(config: TrainConfig, task: Task, data: Data, watch: JobWatch) -> TrainConfig:
    """With the fastest settings for this task and these ranks; what comes after is as if nothing had been tried."""
    collectives = runtime.current().collectives

    def make(asked: TrainConfig) -> Trainer:
        return on_every_rank(lambda: make_trainer(asked, task, data, watch, log_every=asked.log_every), collectives)

    # Steps of local training are those of a rank by itself.
    place = runtime.by_itself() if config.mode == "local" else contextlib.nullcontext()
    with place:
        chosen, tried = autotune.tune(config, make, collectives, watch)
    keras.backend.clear_session()
    runtime.init(seed=config.seed)
    if collectives.rank == 0:
        print(f"autotune: {autotune.told(tried, chosen)}", flush=True)
    return chosen


def _train(config: TrainConfig, task: Task, trainer: Trainer, run_directory: RunDirectory) -> None:
    collectives, reporter = runtime.current().collectives, run_directory.reporter
    restored = trainer.prepare()
    on_every_rank(lambda: run_directory.write_config(config.as_dict()), collectives)
    reporter.started(_facts(config, trainer), RunShape(trainer.total_steps, trainer.plan.steps_per_epoch))
    for note in gpus.look(collectives):
        reporter.warned(trainer.step, note)
    if restored is not None and (changed := _changed(config, restored.manifest["config"])):
        reporter.warned(restored.step, f"goes on with other options than before: {'; '.join(changed)}")
    summary = {"task": config.task, **trainer.fit()}
    on_every_rank(lambda: _finish(config, task, trainer.model, run_directory, summary), collectives)
    reporter.finished(summary)


def _is_complete(config: TrainConfig, run_directory: RunDirectory, path: Path, total_steps: int) -> bool:
    """Whether there is nothing left to do; raises DataError where what was done is not what is asked for."""
    finished = run_directory.finished_run()
    if finished is None or config.resume not in RESUME or finished[1]["steps"] < total_steps:
        return False
    if differences := _changed(config, finished[0]):
        raise DataError(
            f"--run-dir must be that of the same run. Received: {path}, which holds a complete run of other options: "
            f"{'; '.join(differences)}. It was left untouched; give another folder."
        )
    return True


def _changed(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    now = config.as_dict()
    names = [field.name for field in options(config) if field.metadata["group"] in _DECIDING]
    return [
        f"{flag_of(name)} {before.get(name)} before, {now[name]} now"
        for name in names
        if name not in (*OWN_TO_A_RANK, "steps", "epochs") and before.get(name) != now[name]
    ]


def _finish(
    config: TrainConfig, task: Task, model: keras.Model, run_directory: RunDirectory, summary: dict[str, Any]
) -> None:
    compile_plainly(model, config, task)
    run_directory.finish(model, summary)


def _make_trainer(
    config: TrainConfig, task: Task, data: Data, run_directory: RunDirectory, path: Path, watch: JobWatch
) -> Trainer:
    assert config.batch_size is not None
    model = make_model(config, task, data)
    checkpointer = Checkpointer(
        path / "checkpoints", model, keep=config.keep, facts={"task": config.task, "config": config.as_dict()}
    )
    watch.before_end(checkpointer.wait)
    return Trainer(
        model,
        data.training,
        data.evaluation,
        batch_size=config.batch_size,
        steps=total_steps(config, data),
        seed=config.seed,
        accumulate=config.accumulate,
        steps_per_call=config.steps_per_call,
        log_every=config.log_every,
        eval_every=config.eval_every,
        check_every=config.check_every,
        histograms_every=config.histograms_every,
        on_nan=config.on_nan,
        bad_samples=config.bad_samples,
        sync_batchnorm=config.sync_batchnorm,
        jit_compile=config.jit_compile,
        reporter=run_directory.reporter,
        profiler=Profiler(*config.profile_range, folder=run_directory.profile_folder),
        checkpointer=checkpointer,
        checkpoint_every=config.checkpoint_every,
        resume=config.resume,
        watch=watch,
        identity={"task": short_name(config.task)},
        local=_local_training(config),
    )


def _local_training(config: TrainConfig) -> LocalTraining | None:
    if config.mode == "sync":
        return None
    return LocalTraining(
        every=config.average_every,
        schedule=config.average_schedule,
        slots=config.average_slots,
        outer=config.outer,
        outer_rate=config.outer_rate,
        outer_momentum=config.outer_momentum,
        overlap=config.overlap,
        wait_free=config.wait_free,
        after=config.local_after,
        across=config.average_across,
    )


def _mode(config: TrainConfig) -> str:
    if config.mode == "sync":
        return "sync: gradients averaged at every step"
    first = f", after {config.local_after} steps in sync mode" if config.local_after else ""
    return f"local: parameters averaged every {config.average_every} steps{first}"


def _facts(config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    topology = runtime.current().topology
    return {
        "task": f"{config.task}, {trainer.model.count_params():,} parameters",
        "ranks": f"{topology.size} on {topology.cross_size} host(s), started by {topology.launcher}, "
        f"{topology.threads} thread(s) each, rank 0 on {topology.device}",
        "global batch": f"{trainer.plan.global_batch_size} samples, {trainer.plan.steps_per_epoch} steps an epoch, "
        f"{trainer.total_steps} steps in all",
        "mode": _mode(config),
        "learning rate": f"{peak_learning_rate(config):g} ({config.optimizer or 'own'}, decay {config.lr_decay}, "
        f"warm-up {config.warmup_steps} steps)",
    }
