"""``python -m hvdtrain train``: from a configuration to task, model, trainer and run directory, in this order."""

from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.checkpoint.checkpointer import RESUME, Checkpointer, Restored
from hvdtrain.commands import autotune
from hvdtrain.commands.building import (
    compile_plainly,
    make_model,
    peak_learning_rate,
    read_task,
    with_task_defaults,
)
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.run_directory import RunDirectory, open_run_directory
from hvdtrain.commands.session import RANK_OPTIONS, Session, run_on_ranks
from hvdtrain.commands.trained_run import run_folder
from hvdtrain.config.fields import as_dict, flag_of, with_options
from hvdtrain.data import Data
from hvdtrain.distributed import gpu_sharing, runtime
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.loggers.reporter import RunShape
from hvdtrain.system import environment
from hvdtrain.system.supervisor_client import note_listener
from hvdtrain.tasks import Task, short_name
from hvdtrain.training.trainer import Trainer


def run(config: RunConfig | None, refused: HvdtrainError | None) -> int:
    """Trains, or reports on every rank why this one cannot.

    Args:
        config: None if this rank's command line was refused.
        refused: the reason.

    Returns:
        The exit code.
    """
    trainer: Trainer | None = None

    def work(config: RunConfig, session: Session) -> None:
        nonlocal trainer
        collectives = session.collectives
        if collectives.rank == 0:
            note_listener()
        runtime.init(seed=config.training.seed)
        task, data = on_every_rank(lambda: read_task(config), collectives)
        config = on_every_rank(lambda: with_task_defaults(config, task), collectives)
        if environment.restart_number():
            # A job that died resumes from its own last checkpoint, whatever its first start resumed from.
            config = with_options(config, {"resume": "auto"})
        if config.autotune:
            config = autotune.tune(config, task, data, session)
        path = run_folder(config.run_dir, config.task)
        run_directory = open_run_directory(collectives.rank, path)
        try:
            trainer = on_every_rank(lambda: _make_trainer(config, task, data, run_directory, session), collectives)
            on_every_rank(lambda: run_directory.claim(config.training.checkpoint.resume), collectives)
            if on_first_rank(lambda: _is_complete(config, run_directory, trainer.total_steps), collectives):
                run_directory.reporter.already_complete(trainer.total_steps, path)
            else:
                _train(config, task, trainer, run_directory, session)
        finally:
            run_directory.reporter.close()

    process_sets = config is not None and config.training.local_sgd.average_across == "host"
    return run_on_ranks(
        config, refused, work, process_sets=process_sets, step=lambda: None if trainer is None else trainer.step
    )


def _make_trainer(config: RunConfig, task: Task, data: Data, run_directory: RunDirectory, session: Session) -> Trainer:
    model = make_model(config, task, data, session.collectives)
    run_directory.add_reporters(task)
    checkpointer = Checkpointer(
        run_directory.path / "checkpoints",
        model,
        keep=config.training.checkpoint.keep,
        facts={"task": config.task, "config": as_dict(config)},
        identity={"task": short_name(config.task)},
        collectives=session.collectives,
    )
    session.job_watch.before_exit(checkpointer.wait)
    return Trainer(
        model,
        data,
        config.training,
        callbacks=task.make_callbacks(),
        reporter=run_directory.reporter,
        checkpointer=checkpointer,
        job_watch=session.job_watch,
        collectives=session.collectives,
    )


def _train(config: RunConfig, task: Task, trainer: Trainer, run_directory: RunDirectory, session: Session) -> None:
    collectives, reporter = session.collectives, run_directory.reporter

    def start(restored: Restored | None) -> None:
        on_every_rank(lambda: run_directory.write_config(as_dict(config)), collectives)
        shape = RunShape(trainer.total_steps, trainer.plan.steps_per_epoch, trainer.step)
        reporter.started(_facts(config, trainer), shape)
        for warning in gpu_sharing.gpu_warnings(collectives):
            reporter.warned(trainer.step, warning)
        before = None if restored is None else restored.manifest.get("config")
        if restored is not None and isinstance(before, dict) and (changed := _changed_options(config, before)):
            reporter.warned(restored.step, f"resumed with other options than before: {'; '.join(changed)}")

    summary = {"task": config.task, **trainer.fit(on_start=start)}
    on_every_rank(lambda: _finish(config, task, trainer.model, run_directory, summary, collectives.size), collectives)
    reporter.finished(summary)


def _finish(
    config: RunConfig,
    task: Task,
    model: keras.Model,
    run_directory: RunDirectory,
    summary: dict[str, Any],
    num_ranks: int,
) -> None:
    compile_plainly(model, config, task, num_ranks)
    run_directory.finish(model, summary)


def _is_complete(config: RunConfig, run_directory: RunDirectory, total_steps: int) -> bool:
    """Whether nothing remains to be done; raises DataError if the finished run had other options."""
    finished = run_directory.finished_run()
    if finished is None or config.training.checkpoint.resume not in RESUME or finished[1]["steps"] < total_steps:
        return False
    if differences := _changed_options(config, finished[0]):
        raise DataError(
            f"--run-dir must be that of the same run. Received: {run_directory.path}, which holds a complete run with "
            f"other options: {'; '.join(differences)}. It was left untouched; use another folder."
        )
    return True


def _changed_options(config: RunConfig, before: Mapping[str, Any]) -> list[str]:
    """The options that decide the result of a run and were changed; any others may differ when it is resumed."""
    training, now = config.training, as_dict(config)
    same_result = {
        *as_dict(training.checkpoint),
        *as_dict(training.logging),
        *as_dict(training.guards),
        *as_dict(config.runtime),
        *as_dict(config.job_watch),
        *("steps", "epochs", "eval_every", "seed", "steps_per_execution", "jit_compile", "autotune"),
        *RANK_OPTIONS,
    }
    return [
        f"{flag_of(name)} {before.get(name)} before, {now[name]} now"
        for name in now
        if name not in same_result and before.get(name) != now[name]
    ]


def _facts(config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    topology, rate = runtime.current().topology, config.learning_rate
    return {
        "task": f"{config.task}, {trainer.model.count_params():,} parameters",
        "ranks": f"{topology.size} on {topology.cross_size} host(s), started by {topology.launcher}, "
        f"{topology.threads} thread(s) each, rank 0 on {topology.device}",
        "global batch": f"{trainer.plan.global_batch_size} samples, {trainer.plan.steps_per_epoch} steps per epoch, "
        f"{trainer.total_steps} steps in total",
        "mode": _mode(config),
        "learning rate": f"{peak_learning_rate(config, topology.size):g} ({config.optimizer.optimizer or 'own'}, "
        f"decay {rate.lr_decay}, warm-up {rate.warmup_steps} steps)",
    }


def _mode(config: RunConfig) -> str:
    if config.training.mode == "sync":
        return "sync: gradients averaged at every step"
    options = config.training.local_sgd
    first = f", after {options.sync_steps_first} steps in sync mode" if options.sync_steps_first else ""
    return f"local: parameters averaged every {options.sync_every} steps{first}"
