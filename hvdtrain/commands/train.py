"""``python -m hvdtrain train``: makes task, model, trainer and run directory from a configuration, and trains."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.checkpoint.selection import RESUME
from hvdtrain.commands.autotune.suggestion import suggestion
from hvdtrain.commands.autotune.tuning import tune
from hvdtrain.commands.building import (
    compile_plainly,
    local_data_dir,
    make_model,
    peak_learning_rate,
    read_task,
    with_task_defaults,
)
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.provenance import provenance
from hvdtrain.commands.run_directory import RunDirectory, open_run_directory
from hvdtrain.commands.session import RANK_OPTIONS, Session, run_on_ranks
from hvdtrain.config import exclusions
from hvdtrain.config.fields import as_dict, facts_of, with_options
from hvdtrain.config.wording import flag_of
from hvdtrain.data import Data
from hvdtrain.distributed import gpu_sharing, runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.layers import whole_tables
from hvdtrain.layers.table_sizes import sizes_text
from hvdtrain.loggers.reporter import CompositeReporter, Reporter
from hvdtrain.seams import keras_internals
from hvdtrain.stores.urls import is_url
from hvdtrain.system import environment
from hvdtrain.system.network import host_name
from hvdtrain.system.supervisor_client import note_listener
from hvdtrain.system.terminal import report
from hvdtrain.tasks.names import run_dir_of, short_name
from hvdtrain.tasks.task import Task
from hvdtrain.training.rescaling import rescale_learning_rate
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
        if session.rank == 0:
            note_listener()
        runtime.init(seed=config.training.seed)
        data_dir = local_data_dir(config, collectives)
        task, data = on_every_rank(lambda: read_task(config, data_dir), collectives)
        config = on_every_rank(lambda: with_task_defaults(config, task), collectives)
        if environment.restart_number():
            # A job that died resumes from its own last checkpoint, whatever its first start resumed from.
            config = with_options(config, {"resume": "auto"})
        if session.coordinator is not None:
            config = _for_changing_ranks(config, session.coordinator.start_size)
        if config.autotune:
            config = tune(config, task, data, session)
        run_dir, prints_every_line = run_dir_of(config.run_dir, config.task), "log_every" in config.explicitly_set
        directory = on_every_rank(
            lambda: open_run_directory(session.rank, run_dir, prints_every_line=prints_every_line), collectives
        )
        run = Run(config, task, directory, session)
        try:
            trainer = on_every_rank(lambda: run.make_trainer(data), collectives)
            on_every_rank(lambda: run.directory.claim(config.training.checkpoint.resume), collectives)
            if on_first_rank(lambda: _is_complete(config, run.directory, trainer), collectives):
                run.reporter.already_complete(trainer.total_steps, run.directory.name)
            else:
                run.train(trainer, data)
        finally:
            run.reporter.close()
        run.directory.publish_logs()

    process_sets = config is not None and config.training.local_sgd.average_across == "host"
    return run_on_ranks(
        config,
        refused,
        work,
        process_sets=process_sets,
        ranks_may_change=True,
        step=lambda: None if trainer is None else trainer.step,
    )


class Run:
    """A run of a task on this rank."""

    def __init__(self, config: RunConfig, task: Task, directory: RunDirectory, session: Session):
        self._config = config
        self._task = task
        self._session = session
        self.directory = directory
        self._reporters = [directory.reporter]
        self.reporter: Reporter = CompositeReporter(self._reporters)

    def make_trainer(self, data: Data) -> Trainer:
        """The trainer of the task's model."""
        config, session = self._config, self._session
        model = make_model(config, self._task, data, session.collectives)
        self.directory.add_reporters(self._task, config)
        checkpointer = Checkpointer(
            self.directory.checkpoints,
            model,
            keep=config.training.checkpoint.keep,
            facts={"task": config.task, "config": as_dict(config)},
            identity={"task": short_name(config.task)},
            collectives=session.collectives,
            after_save=lambda: self.directory.publish(),
        )
        session.job_watch.before_exit(checkpointer.wait)
        session.job_watch.before_exit(lambda: self.directory.publish_logs())
        return Trainer(
            model,
            data,
            config.training,
            callbacks=self._task.make_callbacks(),
            reporter=self.reporter,
            checkpointer=checkpointer,
            job_watch=session.job_watch,
            collectives=session.collectives,
        )

    def train(self, trainer: Trainer, data: Data) -> None:
        """Trains, and writes the run's results."""
        config, task, collectives = self._config, self._task, self._session.collectives

        def start(restored: Restored | None) -> None:
            hosts = collectives.allgather(host_name())
            made_with = on_every_rank(lambda: provenance(hosts, data.training.facts()), collectives)
            on_every_rank(lambda: self.directory.write_config(as_dict(config), made_with), collectives)
            self.reporter.started(self._facts(trainer), trainer.shape)
            if restored is not None:
                self._rescale_learning_rate(trainer.model, restored.manifest["ranks"])
            for warning in gpu_sharing.gpu_warnings(collectives, runtime.current().topology.device):
                self.reporter.warned(trainer.step, warning)
            before = None if restored is None else restored.manifest.get("config")
            if restored is not None and isinstance(before, dict) and (changed := _changed_options(config, before)):
                self.reporter.warned(restored.step, f"resumed with other options than before: {'; '.join(changed)}")

        def rank_changed(ranks_before: int) -> None:
            self._take_over_if_first(trainer)
            self._rescale_learning_rate(trainer.model, ranks_before)

        summary = {
            "task": config.task,
            **trainer.fit(on_start=start, on_rank_changed=rank_changed),
        }
        with _savable(trainer.model, collectives) as is_whole:
            on_every_rank(
                lambda: _finish(
                    config, task, trainer.model if is_whole else None, self.directory, summary, collectives.size
                ),
                collectives,
            )
        self.reporter.finished(summary)
        if self.directory.writes:
            name = shlex.quote(self.directory.name)
            lines = [f"results: {name}", f"next: python -m hvdtrain eval --run-dir {name}, or compare {name}"]
            if (faster := suggestion(config, summary, exclusions.facts_from(*collectives.conditions))) is not None:
                lines.insert(0, faster)
            with contextlib.suppress(OSError):  # Output that cannot be written changes no exit code.
                print("\n".join(lines), flush=True)

    def _facts(self, trainer: Trainer) -> dict[str, Any]:
        config, plan, topology = self._config, trainer.plan, runtime.current().topology
        launcher = topology.launcher if self._session.coordinator is None else "hvdtrain elastic"
        tables = sizes_text(trainer.model)
        return {
            **({} if tables is None else {"tables": tables}),
            "task": f"{config.task}, {trainer.model.count_params():,} parameters",
            "ranks": f"{topology.size} on {topology.cross_size} host(s), started by {launcher}, "
            f"{topology.threads} thread(s) each, rank 0 on {topology.device}",
            "global batch": f"{plan.global_batch_size} samples, {plan.steps_per_epoch} steps per epoch, "
            f"{trainer.total_steps} steps in total",
            "mode": _mode(config),
            "learning rate": _learning_rates(config, trainer.model, topology.size),
        }

    def _rescale_learning_rate(self, model: keras.Model, ranks_before: int) -> None:
        if self._config.training.rescale:
            scaling, ranks = self._config.learning_rate.lr_scaling, self._session.collectives.size
            rescale_learning_rate(model, scaling, ranks_before=ranks_before, ranks=ranks)

    def _take_over_if_first(self, trainer: Trainer) -> None:
        """Continues the files of the previous rank 0, if this process is rank 0 now."""
        if self._session.collectives.rank != 0 or self.directory.writes:
            return
        config = self._config
        self.directory = open_run_directory(0, self.directory.name)
        self.directory.claim("auto")
        self.directory.add_reporters(self._task, config)
        self._reporters.append(self.directory.reporter)
        self.directory.reporter.started({}, trainer.shape)


def _for_changing_ranks(config: RunConfig, start_size: int) -> RunConfig:
    """The configuration of a job whose number of ranks may change; without --rescale, the global batch stays the
    same."""
    exclusions.require_compatible({**facts_of(config), **exclusions.facts_from(exclusions.ELASTIC)})
    if config.run_dir is not None and is_url(config.run_dir):
        raise UsageError(
            f"elastic jobs need a --run-dir that all processes share. Received: {config.run_dir}. Use a folder."
        )
    if config.training.global_batch_size is not None or config.training.rescale:
        return config
    return with_options(config, {"global_batch_size": config.training.batch_size * start_size})


@contextlib.contextmanager
def _savable(model: keras.Model, collectives: Collectives) -> Iterator[bool]:
    """In the block, rank 0 can save the model; False if its sharded tables do not fit into the memory of rank 0."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(whole_tables(model, collectives=collectives))
        except UsageError as error:
            if collectives.rank == 0:
                report(0, f"model.keras is not written: {error}")
            yield False
        else:
            yield True


def _finish(
    config: RunConfig,
    task: Task,
    model: keras.Model | None,
    run_directory: RunDirectory,
    summary: dict[str, Any],
    num_ranks: int,
) -> None:
    if model is not None:
        compile_plainly(model, config, task, num_ranks)
    run_directory.finish(model, summary)


def _is_complete(config: RunConfig, run_directory: RunDirectory, trainer: Trainer) -> bool:
    """Whether nothing remains to be done; raises DataError if the finished run had other options."""
    finished = run_directory.finished_run()
    if finished is None or config.training.checkpoint.resume not in RESUME:
        return False
    training, made = config.training, finished[1]
    # With --rescale, the number of steps in an epoch depended on the number of ranks.
    by_epochs = training.rescale and training.epochs is not None
    if made["epochs"] < training.epochs if by_epochs else made["steps"] < trainer.total_steps:
        return False
    if differences := _changed_options(config, finished[0]):
        raise DataError(
            f"--run-dir must belong to the same run. Received: {run_directory.name}, a complete run with other "
            f"options: {'; '.join(differences)}. It was left untouched; use another folder."
        )
    return True


def _changed_options(config: RunConfig, before: Mapping[str, Any]) -> list[str]:
    """The changed options that affect a run's result; all others may differ when it is resumed."""
    training, now = config.training, as_dict(config)
    same_result = {
        *as_dict(training.checkpoint),
        *as_dict(training.logging),
        *as_dict(training.guards),
        *as_dict(training.balancing),
        *as_dict(config.runtime),
        *as_dict(config.job_watch),
        *(
            "steps",
            "epochs",
            "eval_every",
            "seed",
            "steps_per_execution",
            "jit_compile",
            "autotune",
            "autotune_limit",
            "record",
        ),
        *RANK_OPTIONS,
    }
    return [
        f"{flag_of(name)} {before.get(name)} before, {now[name]} now"
        for name in now
        if name not in same_result and before.get(name) != now[name]
    ]


def _learning_rates(config: RunConfig, model: keras.Model, num_ranks: int) -> str:
    asked, peak = config.learning_rate, peak_learning_rate(config, num_ranks)
    if peak is not None:
        name = config.optimizer.optimizer or "own"
        return f"{peak:g} ({name}, decay {asked.lr_decay}, warm-up {asked.warmup_steps} steps)"
    found = []
    for each in leaves_of(model):
        rate = keras_internals.LEARNING_RATE.of(each)
        is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        found.append(f"{type(rate).__name__ if is_schedule else f'{float(each.learning_rate):g}'} ({each.name})")
    return ", ".join(found)


def _mode(config: RunConfig) -> str:
    if config.training.mode == "sync" and (quorum := config.training.stragglers.quorum) is not None:
        return f"sync: a step closes when {quorum} ranks are ready"
    if config.training.mode == "sync":
        return "sync: gradients averaged at every step"
    options = config.training.local_sgd
    first = f", after {options.sync_steps_first} steps in sync mode" if options.sync_steps_first else ""
    return f"local: parameters averaged every {options.sync_every} steps{first}"
