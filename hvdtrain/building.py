"""From a configuration to a task, its data, and a compiled model."""

import dataclasses
from pathlib import Path
from typing import Any

import keras

from hvdtrain import runtime
from hvdtrain.config import TrainConfig, converted
from hvdtrain.errors import UsageError
from hvdtrain.optimizer import DistributedOptimizer
from hvdtrain.sampling import SamplePlan
from hvdtrain.schedule import WarmUpThenDecay, scaled_learning_rate
from hvdtrain.tasks import Data, Task, load_task
from hvdtrain.weight_average import ramp_up


def with_task_defaults(config: TrainConfig, task: Task) -> TrainConfig:
    """Fills in what the command line left to the task.

    Raises:
        UsageError: a default of the task breaks its rule.
    """
    defaults = {
        name: converted(name, value, TrainConfig) for name, value in task.defaults.items() if name not in config.given
    }
    if config.given & {"steps", "epochs"}:
        defaults = {name: value for name, value in defaults.items() if name not in ("steps", "epochs")}
    if config.given & {"lr_decay_steps", "lr_decay_epochs"}:
        defaults.pop("lr_decay_epochs", None)
    if config.optimizer is None and isinstance(task.optimizer, str):
        defaults["optimizer"] = task.optimizer
    if config.learning_rate is None and "learning_rate" not in defaults:
        optimizer = keras.optimizers.get(task.optimizer) if isinstance(task.optimizer, str) else task.optimizer()
        defaults["learning_rate"] = _own_learning_rate(optimizer)
    if config.batch_size is None:
        defaults.setdefault("batch_size", 32)
    if config.steps is None and config.epochs is None and not defaults.keys() & {"steps", "epochs"}:
        defaults["epochs"] = 1
    return dataclasses.replace(config, **defaults)


def read_task(config: TrainConfig) -> tuple[Task, Data]:
    """The task that a configuration names, and its data; raises as these do."""
    task = load_task(config.task)
    return task, task.read_data(Path(config.data_dir) if config.data_dir else None)


def total_steps(config: TrainConfig, data: Data) -> int:
    """How many steps the run makes."""
    return config.steps or (config.epochs or 0) * steps_per_epoch(config, data)


def steps_per_epoch(config: TrainConfig, data: Data) -> int:
    """How many steps go once through the training samples."""
    assert config.batch_size is not None
    plan = SamplePlan(
        num_samples=data.training.num_samples,
        batch_size=config.batch_size,
        size=runtime.current().collectives.size,
        accumulate=config.accumulate,
    )
    return plan.steps_per_epoch


def make_model(config: TrainConfig, task: Task, data: Data) -> keras.Model:
    """The task's model, compiled with a distributed optimizer."""
    if config.mixed_precision != "none":
        keras.config.set_dtype_policy(f"mixed_{config.mixed_precision}")
    model = task.make_model(data)
    plain = make_optimizer(config, task, _learning_rate(config, data))
    optimizer = DistributedOptimizer(
        plain,
        op=config.op,
        compression=config.compression,
        groups=config.groups,
        sparse_as_dense=config.sparse_as_dense,
    )
    if config.ema_ramp:
        ramp_up(optimizer)
    model.compile(optimizer=optimizer, loss=task.make_loss(), metrics=task.metrics())
    return model


def compile_plainly(model: keras.Model, config: TrainConfig, task: Task) -> None:
    """Compiles with what is Keras' own, so that a saved model opens without hvdtrain."""
    optimizer = make_optimizer(config, task, peak_learning_rate(config))
    model.compile(optimizer=optimizer, loss=task.make_loss(), metrics=task.metrics())


def make_optimizer(config: TrainConfig, task: Task, learning_rate: Any) -> keras.optimizers.Optimizer:
    """The plain Keras optimizer that a configuration names, or the task makes.

    Args:
        learning_rate: a number or a schedule.

    Raises:
        UsageError: Keras has no optimizer of that name.
    """
    options: dict[str, Any] = {"learning_rate": learning_rate}
    if config.clip_norm is not None:
        options["global_clipnorm"] = config.clip_norm
    if config.clip_value is not None:
        options["clipvalue"] = config.clip_value
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.ema is not None:
        options.update(use_ema=True, ema_momentum=config.ema)
    if config.accumulate > 1:
        options["gradient_accumulation_steps"] = config.accumulate
    name = config.optimizer
    if name is None:
        assert not isinstance(task.optimizer, str)
        own = task.optimizer()
        return type(own).from_config({**own.get_config(), **options})
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


def _learning_rate(config: TrainConfig, data: Data) -> Any:
    peak = peak_learning_rate(config)
    if not config.warmup_steps and config.lr_decay == "none":
        return peak
    in_all = total_steps(config, data)
    decay_steps = config.lr_decay_steps or max(1, in_all // 3)
    if config.lr_decay_epochs is not None:
        decay_steps = config.lr_decay_epochs * steps_per_epoch(config, data)
    return WarmUpThenDecay(
        peak,
        warmup_steps=config.warmup_steps,
        decay=config.lr_decay,
        decay_rate=config.lr_decay_rate,
        decay_steps=decay_steps,
        total_steps=in_all,
        micro_batches_per_step=config.accumulate,
    )


def _own_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise UsageError(
            "a task's optimizer must have a number for its learning rate, for flags change it. Received: "
            f"{type(optimizer._learning_rate).__name__}. Give a number, and defaults such as "
            '{"lr_decay": "cosine", "warmup_steps": 100}.'
        )
    return float(optimizer.learning_rate)
