"""Builds a task, its data and a compiled model from a configuration."""

from pathlib import Path
from typing import Any, TypeVar

import keras

from hvdtrain.commands.config import RunConfig, TaskConfig
from hvdtrain.config.fields import option_names, with_options
from hvdtrain.data import Data
from hvdtrain.data.downloads import local_copies
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import distribute
from hvdtrain.optim.learning_rate import WarmUpThenDecay, scaled_learning_rate
from hvdtrain.seams import keras_internals
from hvdtrain.tasks.loading import load_task
from hvdtrain.tasks.task import Task
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.plan import sample_plan, total_steps

TaskConfigT = TypeVar("TaskConfigT", bound=TaskConfig)


def with_task_defaults(config: TaskConfigT, task: Task) -> TaskConfigT:
    """Sets the options that were not set explicitly to the task's defaults.

    Raises:
        UsageError: a default of the task breaks its rule.
    """
    explicit = config.explicitly_set
    for name in task.defaults:
        if name not in option_names(RunConfig):
            raise UsageError(f"a task's defaults must be options of train. Received: {name!r}")
    known = option_names(type(config))
    defaults = {name: value for name, value in task.defaults.items() if name not in explicit and name in known}
    for exclusive in ({"steps", "epochs"}, {"lr_decay_steps", "lr_decay_epochs"}):
        if explicit & exclusive:
            defaults = {name: value for name, value in defaults.items() if name not in exclusive}
    if config.optimizer.optimizer is None and isinstance(task.optimizer, str):
        defaults["optimizer"] = task.optimizer
    if config.learning_rate.learning_rate is None and "learning_rate" not in defaults:
        defaults["learning_rate"] = _own_learning_rate(_own_optimizer(task))
    if "epochs" in known and not (explicit | defaults.keys()) & {"steps", "epochs"}:
        defaults["epochs"] = 1
    return with_options(config, defaults)


def local_data_dir(config: TaskConfig, collectives: Collectives) -> Path | None:
    """The folder with the task's data files, or the local copy of one in an object store. Collective.

    Raises:
        JobError: on every rank, if one cannot download them.
    """
    (folder,) = local_copies([config.data_dir or ""], collectives)
    return Path(folder) if folder else None


def read_task(config: TaskConfig, data_dir: Path | None) -> tuple[Task, Data]:
    """The task of a configuration, and its data; exceptions of the task propagate."""
    task = load_task(config.task)
    return task, task.read_data(data_dir)


def make_model(config: TaskConfig, task: Task, data: Data, collectives: Collectives) -> keras.Model:
    """The task's model, compiled with a distributed optimizer."""
    if config.mixed_precision != "none":
        keras.config.set_dtype_policy(f"mixed_{config.mixed_precision}")
    model = task.make_model(data)
    plan = sample_plan(data.training, config.training, collectives)
    plain = make_optimizer(config, task, _learning_rate(config, plan))
    compression = make_compression(config.reduction.compression, config.reduction.compression_after)
    optimizer = distribute(plain, config.reduction, compression, collectives, ema_ramp=config.optimizer.ema_ramp)
    task.compile(model, optimizer)
    return model


def compile_plainly(model: keras.Model, config: TaskConfig, task: Task, num_ranks: int) -> None:
    """Compiles with Keras' own optimizer, so that a saved model opens without hvdtrain."""
    task.compile(model, make_optimizer(config, task, peak_learning_rate(config, num_ranks)))


def make_optimizer(config: TaskConfig, task: Task, learning_rate: Any) -> keras.optimizers.Optimizer:
    """The plain Keras optimizer that a configuration names, or the task makes.

    Args:
        learning_rate: a number or a schedule.

    Raises:
        UsageError: Keras has no optimizer of that name.
    """
    asked, accumulation = config.optimizer, config.training.gradient_accumulation_steps
    options: dict[str, Any] = {"learning_rate": learning_rate}
    if asked.clip_norm is not None:
        options["global_clipnorm"] = asked.clip_norm
    if asked.clip_value is not None:
        options["clipvalue"] = asked.clip_value
    if asked.weight_decay is not None:
        options["weight_decay"] = asked.weight_decay
    if asked.ema is not None:
        options.update(use_ema=True, ema_momentum=asked.ema)
    if accumulation > 1:
        options["gradient_accumulation_steps"] = accumulation
    name = asked.optimizer
    if name is None:
        own = _own_optimizer(task)
        return type(own).from_config({**own.get_config(), **options})
    if name == "momentum":
        name = "sgd"
        options["momentum"] = 0.9
    try:
        made = keras.optimizers.get({"class_name": name, "config": options})
        if type(made) is keras.optimizers.Optimizer:
            raise ValueError("the base class of all optimizers")
        return made
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"--optimizer must be momentum or the name of a Keras optimizer (sgd, adam, adamw, …). Received: {name!r} "
            f"({str(error).splitlines()[0]})"
        ) from error


def peak_learning_rate(config: TaskConfig, num_ranks: int) -> float:
    """The learning rate after warm-up and before decay, scaled to the number of ranks."""
    learning_rate = config.learning_rate.learning_rate
    assert learning_rate is not None
    return scaled_learning_rate(learning_rate, config.learning_rate.lr_scaling, num_ranks)


def _learning_rate(config: TaskConfig, plan: SamplePlan) -> Any:
    peak, asked = peak_learning_rate(config, plan.size), config.learning_rate
    if not asked.warmup_steps and asked.lr_decay == "none":
        return peak
    in_all = total_steps(config.training, plan) if isinstance(config.training, TrainConfig) else plan.steps_per_epoch
    decay_steps = asked.lr_decay_steps or max(1, in_all // 3)
    if asked.lr_decay_epochs is not None:
        decay_steps = asked.lr_decay_epochs * plan.steps_per_epoch
    return WarmUpThenDecay(
        peak,
        warmup_steps=asked.warmup_steps,
        decay=asked.lr_decay,
        decay_rate=asked.lr_decay_rate,
        decay_steps=decay_steps,
        total_steps=in_all,
        micro_batches_per_step=config.training.gradient_accumulation_steps,
    )


def _own_optimizer(task: Task) -> keras.optimizers.Optimizer:
    return keras.optimizers.get(task.optimizer) if isinstance(task.optimizer, str) else task.optimizer()


def _own_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    learning_rate = keras_internals.LEARNING_RATE.of(optimizer)
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise UsageError(
            "a task's optimizer must have a number for its learning rate, because flags change it. Received: "
            f"{type(learning_rate).__name__}. Set a number, and defaults such as "
            '{"lr_decay": "cosine", "warmup_steps": 100}.'
        )
    return float(optimizer.learning_rate)
