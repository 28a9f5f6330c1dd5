"""One training job from its configuration: task, model, trainer, run directory, in this order."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from hvdtrain import process, replicas, runtime
from hvdtrain.averaging import LocalTraining
from hvdtrain.checkpoint import RESUME, Checkpointer
from hvdtrain.config import LEARNING, LOCAL, RANKS, WHAT, TrainConfig, flag_of
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.failure import JobWatch, end_job, exit_code_of, on_every_rank, on_first_rank
from hvdtrain.optimizer import DistributedOptimizer
from hvdtrain.report import Reporter, RunShape
from hvdtrain.run_directory import RunDirectory, open_run_directory
from hvdtrain.sampling import SamplePlan
from hvdtrain.schedule import WarmUpThenDecay, scaled_learning_rate
from hvdtrain.supervised import note_exit_code, note_listener
from hvdtrain.tasks import Data, Task, load_task
from hvdtrain.timing.profiler import Profiler
from hvdtrain.trainer import Trainer

# May differ between ranks: folders and cores are a host's own.
_OWN_TO_A_RANK = ("data_dir", "run_dir", "threads", "timeline")
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
    collectives = None
    trainer: Trainer | None = None
    watch: JobWatch | None = None
    reporter = Reporter()
    try:
        runtime.init(
            threads=config.threads if config else None,
            deterministic=config.deterministic if config else False,
            timeline=config.timeline if config else None,
            process_groups=config is not None and config.average_across == "host",
        )
        collectives = runtime.current().collectives
        asked = on_every_rank(lambda: _accepted(config, refused), collectives)
        shared = {flag_of(name): value for name, value in asked.as_dict().items() if name not in _OWN_TO_A_RANK}
        replicas.require_agreement("configuration and versions", {**shared, **process.versions()}, collectives)
        watch = JobWatch(collectives, stall_timeout_s=asked.stall_timeout)
        watch.start()
        if collectives.rank == 0:
            note_listener()
        runtime.init(seed=asked.seed)
        task, data = on_every_rank(lambda: _read(asked), collectives)
        config = with_task_defaults(asked, task)
        path = Path(config.run_dir or f"runs/{config.task}")
        run_directory = open_run_directory(collectives.rank, path)
        reporter = run_directory.reporter
        trainer = on_every_rank(lambda: _make_trainer(config, task, data, run_directory, path, watch), collectives)
        on_every_rank(lambda: run_directory.claim(config.resume), collectives)
        if on_first_rank(lambda: _is_complete(config, run_directory, path, trainer.total_steps), collectives):
            reporter.complete(trainer.total_steps, path)
        else:
            _train(config, task, trainer, run_directory)
        reporter.close()
        watch.close()
    except Exception as error:
        reporter.close()
        note_exit_code(exit_code_of(error))
        end_job(error, collectives, None if trainer is None else trainer.step, watch)
    return 0


def _train(config: TrainConfig, task: Task, trainer: Trainer, run_directory: RunDirectory) -> None:
    collectives, reporter = runtime.current().collectives, run_directory.reporter
    restored = trainer.prepare()
    on_every_rank(lambda: run_directory.write_config(config.as_dict()), collectives)
    reporter.started(_facts(config, trainer), RunShape(trainer.total_steps, trainer.plan.steps_per_epoch))
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
    names = [field.name for field in dataclasses.fields(config) if field.metadata["group"] in _DECIDING]
    return [
        f"{flag_of(name)} {before.get(name)} before, {now[name]} now"
        for name in names
        if name not in (*_OWN_TO_A_RANK, "steps", "epochs") and before.get(name) != now[name]
    ]


def _accepted(config: TrainConfig | None, refused: HvdtrainError | None) -> TrainConfig:
    if refused is not None:
        raise refused
    assert config is not None
    return config


def with_task_defaults(config: TrainConfig, task: Task) -> TrainConfig:
    """Fills in what the command line left to the task."""
    defaults: dict[str, Any] = {
        name: getattr(task, name)
        for name in ("batch_size", "optimizer", "learning_rate")
        if getattr(config, name) is None
    }
    if config.steps is None and config.epochs is None:
        defaults["epochs"] = task.epochs
    if process.restart_number():
        # A job that died goes on from its own last checkpoint, whatever it began with.
        defaults["resume"] = "auto"
    return dataclasses.replace(config, **defaults)


def make_optimizer(config: TrainConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """The plain Keras optimizer that a configuration names.

    Args:
        learning_rate: a number or a schedule.

    Raises:
        UsageError: Keras has no optimizer of that name.
    """
    assert config.optimizer is not None
    options: dict[str, Any] = {
        "learning_rate": learning_rate,
        "global_clipnorm": config.clip_norm,
        "clipvalue": config.clip_value,
    }
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.ema is not None:
        options.update(use_ema=True, ema_momentum=config.ema)
    if config.accumulate > 1:
        options["gradient_accumulation_steps"] = config.accumulate
    name = config.optimizer
    if name == "momentum":
        name = "sgd"
        options["momentum"] = 0.9
    try:
        return keras.optimizers.get({"class_name": name, "config": options})
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--optimizer must be momentum or the name of a Keras optimizer (sgd, adam, adamw, …). Received: {name!r} "
            f"({str(error).splitlines()[0]})"
        ) from error


def peak_learning_rate(config: TrainConfig) -> float:
    """The learning rate after warm-up and before decay, scaled to the number of ranks."""
    assert config.learning_rate is not None
    return scaled_learning_rate(config.learning_rate, config.lr_scaling, runtime.current().topology.size)


def _learning_rate(config: TrainConfig, total_steps: int) -> Any:
    peak = peak_learning_rate(config)
    if not config.warmup_steps and config.lr_decay == "none":
        return peak
    return WarmUpThenDecay(
        peak,
        warmup_steps=config.warmup_steps,
        decay=config.lr_decay,
        decay_rate=config.lr_decay_rate,
        decay_steps=config.lr_decay_steps or max(1, total_steps // 3),
        total_steps=total_steps,
        micro_batches_per_step=config.accumulate,
    )


def _finish(
    config: TrainConfig, task: Task, model: keras.Model, run_directory: RunDirectory, summary: dict[str, Any]
) -> None:
    # The saved model has to open without hvdtrain, which a schedule of ours would need.
    model.compile(
        optimizer=make_optimizer(config, peak_learning_rate(config)), loss=task.loss(), metrics=task.metrics()
    )
    run_directory.finish(model, summary)


def _read(config: TrainConfig) -> tuple[Task, Data]:
    task = load_task(config.task)
    return task, task.read_data(Path(config.data_dir) if config.data_dir else None)


def _make_trainer(
    config: TrainConfig, task: Task, data: Data, run_directory: RunDirectory, path: Path, watch: JobWatch
) -> Trainer:
    assert config.batch_size is not None
    collectives = runtime.current().collectives
    plan = SamplePlan(
        num_samples=data.training.num_samples,
        batch_size=config.batch_size,
        size=collectives.size,
        accumulate=config.accumulate,
    )
    total_steps = config.steps or (config.epochs or 0) * plan.steps_per_epoch
    if config.mixed_precision != "none":
        keras.config.set_dtype_policy(f"mixed_{config.mixed_precision}")
    model = task.make_model()
    optimizer = make_optimizer(config, _learning_rate(config, total_steps))
    model.compile(
        optimizer=DistributedOptimizer(optimizer, op=config.op, compression=config.compression, groups=config.groups),
        loss=task.loss(),
        metrics=task.metrics(),
    )
    checkpointer = Checkpointer(
        path / "checkpoints", model, keep=config.keep, facts={"task": config.task, "config": config.as_dict()}
    )
    watch.before_end(checkpointer.wait)
    return Trainer(
        model,
        data.training,
        data.evaluation,
        batch_size=config.batch_size,
        steps=total_steps,
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
        reporter=run_directory.reporter,
        profiler=Profiler(*config.profile_range, folder=run_directory.profile_folder),
        checkpointer=checkpointer,
        checkpoint_every=config.checkpoint_every,
        resume=config.resume,
        watch=watch,
        identity={"task": config.task},
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
        "learning rate": f"{peak_learning_rate(config):g} ({config.optimizer}, decay {config.lr_decay}, "
        f"warm-up {config.warmup_steps} steps)",
    }
