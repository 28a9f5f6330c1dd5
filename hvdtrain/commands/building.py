"""Builds a task, its data and a compiled model from a configuration."""

from collections.abc import Set
from pathlib import Path
from typing import Any, TypeVar

import keras

from hvdtrain.commands.config import RunConfig, TaskConfig
from hvdtrain.config.fields import option_names, with_options
from hvdtrain.config.wording import option
from hvdtrain.data import Data
from hvdtrain.data.downloads import local_copies
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.config import LearningRateConfig, OptimizerConfig
from hvdtrain.optim.distributed_optimizer import distribute
from hvdtrain.optim.learning_rate import WarmUpThenDecay, scaled_learning_rate
from hvdtrain.seams import keras_internals
from hvdtrain.system import error_text
from hvdtrain.tasks.loading import load_task
from hvdtrain.tasks.task import Task
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.plan import sample_plan, total_steps

TaskConfigT = TypeVar("TaskConfigT", bound=TaskConfig)

_RATE_OPTIONS = set(option_names(LearningRateConfig))


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
    if task.optimizer is None:
        _refuse_options_of_optimizers(explicit | defaults.keys())
    else:
        defaults |= _optimizer_defaults(config, task, explicit | defaults.keys())
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
    """The task's model, compiled with distributed optimizers."""
    if config.mixed_precision != "none":
        keras.config.set_dtype_policy(f"mixed_{config.mixed_precision}")

    def distributed(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        compression = make_compression(config.reduction.compression, config.reduction.compression_after)
        return distribute(optimizer, config.reduction, compression, collectives, ema_ramp=config.optimizer.ema_ramp)

    model = task.make_model(data)
    if task.optimizer is None:
        for each in optimizers_of(model):
            distributed(each)
        return model
    plan = sample_plan(data.training, config.training, collectives)
    task.compile(model, distributed(make_optimizer(config, task, _learning_rate(config, plan))))
    return model


def compile_plainly(model: keras.Model, config: TaskConfig, task: Task, num_ranks: int) -> None:
    """Compiles with Keras' own optimizer, so that a saved model opens without the schedule of hvdtrain's options."""
    if task.optimizer is not None:
        task.compile(model, make_optimizer(config, task, peak_learning_rate(config, num_ranks)))


def make_optimizer(config: TaskConfig, task: Task, learning_rate: Any) -> keras.optimizers.Optimizer:
    """The plain Keras optimizer that a configuration names, or the task makes.

    Args:
        learning_rate: a number or a schedule; None: the schedule of the task's optimizer.

    Raises:
        UsageError: Keras has no optimizer of that name.
    """
    asked, accumulation = config.optimizer, config.training.gradient_accumulation_steps
    if learning_rate is None:
        learning_rate = keras_internals.LEARNING_RATE.of(_own_optimizer(task))
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
            f"({error_text.message(error)})"
        ) from error


def peak_learning_rate(config: TaskConfig, num_ranks: int) -> float | None:
    """The learning rate after warm-up and before decay, scaled to the number of ranks; None: a schedule of the
    task's."""
    learning_rate = config.learning_rate.learning_rate
    if learning_rate is None:
        return None
    return scaled_learning_rate(learning_rate, config.learning_rate.lr_scaling, num_ranks)


def _learning_rate(config: TaskConfig, plan: SamplePlan) -> Any:
    peak, asked = peak_learning_rate(config, plan.size), config.learning_rate
    if peak is None or (not asked.warmup_steps and asked.lr_decay == "none"):
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
    return task.optimizer() if callable(task.optimizer) else keras.optimizers.get(task.optimizer)


def _optimizer_defaults(config: TaskConfig, task: Task, given: Set[str]) -> dict[str, Any]:
    """The name of the task's optimizer, and its learning rate.

    Args:
        given: options that are set, by the user or by the task's defaults.
    """
    defaults: dict[str, Any] = {}
    if config.optimizer.optimizer is None and isinstance(task.optimizer, str):
        defaults["optimizer"] = task.optimizer
    if config.learning_rate.learning_rate is not None or "learning_rate" in given:
        return defaults
    own = _own_optimizer(task)
    schedule = keras_internals.LEARNING_RATE.of(own)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        defaults["learning_rate"] = float(own.learning_rate)
    elif changing := sorted(given & _RATE_OPTIONS):
        raise UsageError(
            f"{option(changing[0])} needs a number for the learning rate. Received: a task whose optimizer has a "
            f"schedule, {type(schedule).__name__}. Set {option('learning_rate')} as well, which replaces it."
        )
    return defaults


def _refuse_options_of_optimizers(given: Set[str]) -> None:
    if refused := sorted(given & (_RATE_OPTIONS | set(option_names(OptimizerConfig)))):
        raise UsageError(
            f"{option(refused[0])} needs a task that has an optimizer. Received: a task that compiles its model "
            "itself. Set this where it does."
        )
