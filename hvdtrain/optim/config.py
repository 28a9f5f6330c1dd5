"""Options of the optimizer and of its learning rate."""

import dataclasses
import math
from typing import Literal

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require


@Parameter(name="*", group=help_group("Optimizer"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """The optimizer. ``None`` means the task's own setting, or Keras' default."""

    optimizer: str | None = None
    """Name of a Keras optimizer (sgd, adam, adamw, …), or momentum: SGD with momentum 0.9 (default: the task's)."""
    clip_norm: float | None = None
    """Largest global norm of the averaged gradient (default: no limit)."""
    clip_value: float | None = None
    """Largest magnitude of an element of the averaged gradient (default: no limit)."""
    weight_decay: float | None = None
    """Decoupled weight decay, per step and unit of learning rate (default: the optimizer's)."""
    ema: float | None = None
    """Momentum of an exponential moving average of the weights, which is evaluated and saved (default: no EMA)."""
    ema_ramp: bool = False
    """Let the momentum of the EMA rise to --ema: the smaller of it and (1 + step) / (10 + step)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_norm", "clip_value"):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(self, "weight_decay", lambda value: math.isfinite(value) and value >= 0, "a finite number, at least 0")
        require(self, "ema", lambda value: 0 <= value < 1, "at least 0 and below 1")


@Parameter(name="*", group=help_group("Learning rate"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRateConfig(Config):
    """The learning rate and its schedule."""

    learning_rate: float | None = None
    """Learning rate, before --lr-scaling (default: the task's)."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "none"
    """Multiply the learning rate by the number of ranks, by its square root, or by 1."""
    warmup_steps: int = 0
    """Raise the learning rate linearly from 0 over the first N steps."""
    lr_decay: Literal["none", "exponential", "cosine"] = "none"
    """exponential: multiply by --lr-decay-rate every --lr-decay-steps; cosine: decay to 0 at the end."""
    lr_decay_rate: float = 0.1
    """Factor of --lr-decay exponential."""
    lr_decay_steps: int | None = None
    """Steps between two decays of --lr-decay exponential (default: a third of the run)."""
    lr_decay_epochs: int | None = None
    """The same in epochs; excludes --lr-decay-steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "lr_decay_rate"):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(self, "warmup_steps", lambda value: value >= 0, "at least 0")
        for name in ("lr_decay_steps", "lr_decay_epochs"):
            require(self, name, lambda value: value >= 1, "at least 1")
