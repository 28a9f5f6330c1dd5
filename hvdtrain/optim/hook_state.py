"""What hvdtrain keeps on an optimizer object: the hooks of :mod:`hvdtrain.optim.hooks` and their state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer, ReducedGradients
from hvdtrain.distributed.optimizers import leaves, leaves_of
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.errors import UsageError
from hvdtrain.optim.epoch_steps import EpochSteps
from hvdtrain.optim.equal_start import EqualStart

Monitor = Callable[[ReducedGradients, Sequence[keras.Variable]], list[Gradient]]
"""Receives a step's reduced gradients and their variables, and returns the gradients to apply."""


@dataclasses.dataclass
class LoopHooks:
    """What a training loop does with the loss and the gradients of each micro-batch."""

    weigh_loss: Callable[[tf.Tensor], tf.Tensor]
    prepare_gradients: Callable[[Sequence[Gradient | None], bool], Sequence[Gradient | None]]
    """Receives the gradients, and whether ``weigh_loss`` was called for their loss; returns those to apply."""
    skips_non_finite: bool
    """Whether steps with a gradient that is not finite are skipped, so that their loss is no part of the mean."""
    sample_weight: Callable[[], tf.Tensor | None] = lambda: None
    """While a step is traced: the weight that ``weigh_loss`` multiplies by; None if all ranks have the same."""
    excluded_by: Sequence[str] = ()
    """The options because of which ranks cannot communicate in the forward pass."""
    num_applies: int = 0
    """Number of times that gradients were applied, or traced to be."""
    held: list[tuple[Sequence[Any], Any]] | None = None
    """If not None, gradients are collected here, with their variables, instead of being applied."""


@dataclasses.dataclass
class GradientHooks:
    """How one optimizer reduces its gradients and applies them."""

    reduction: ReductionConfig
    collectives: Collectives
    reduce: GradientReducer
    equal_start: EqualStart
    compression: Compression | None = None
    epoch_steps: EpochSteps | None = None
    """If not None, counts steps in ``model.fit``; compiled steps must be compiled anew when it changes."""
    local_variables: Callable[[], Sequence[keras.Variable]] = list
    """Returns the variables whose gradients are not reduced: each rank trains its own."""
    monitor: Monitor | None = None
    applies: tf.Variable | None = None
    """If not None, updates are made only while it is true."""
    step_weight: Callable[[], tf.Tensor] | None = None
    """If not None, this rank's mean weight over the micro-batches of the step, less than 1 if samples were left out."""
    are_reduced: bool = False
    """Whether the gradients that are applied have been reduced before, and are equal on all ranks."""
    ema_ramp: bool = False
    """Whether the momentum of the EMA rises to its final value."""
    variables: Sequence[keras.Variable] = ()
    """The variables whose gradients are being applied."""
    checked: Sequence[tf.Tensor] = ()
    """While a step is traced: one of its reduced gradients, which exists if the step may be made."""
    num_reductions: int = 0
    """Number of traced reductions."""

    @property
    def sharded(self) -> ShardedReduction | None:
        """The reduction of a sharded optimizer; None if each rank updates all variables."""
        return self.reduce if isinstance(self.reduce, ShardedReduction) else None

    @property
    def share(self) -> float:
        """What to multiply a rank's own gradient by, for the gradient of its samples within the whole batch."""
        return 1.0 if self.reduction.op == "sum" else 1 / self.collectives.size

    def are_local(self, variables: Sequence[keras.Variable]) -> list[bool]:
        """Which of the variables each rank trains alone."""
        local = {id(variable) for variable in self.local_variables()}
        return [id(variable) in local for variable in variables]


@dataclasses.dataclass
class InstalledHooks:
    """Everything that hvdtrain keeps on one optimizer object."""

    loop: LoopHooks | None = None
    gradient: GradientHooks | None = None
    before_loop: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """What restores the methods that the loop's hooks replaced."""


def installed_hooks(optimizer: keras.optimizers.Optimizer) -> InstalledHooks:
    """The hooks on an optimizer object, to read or to change."""
    # Past Keras' __setattr__, which would look for variables in it.
    hooks: InstalledHooks = vars(optimizer).setdefault("hvdtrain_hooks", InstalledHooks())
    return hooks


def gradient_hooks(optimizer: keras.optimizers.Optimizer) -> GradientHooks | None:
    """The hooks of a distributed optimizer; None for a plain one."""
    return installed_hooks(leaves(optimizer)[0]).gradient


def model_hooks(model: keras.Model) -> list[GradientHooks]:
    """The hooks of the distributed optimizers that a model trains with."""
    return [hooks for leaf in leaves_of(model) if (hooks := installed_hooks(leaf).gradient) is not None]


def require_model_hooks(model: keras.Model) -> list[GradientHooks]:
    """The same, at least one.

    Raises:
        UsageError: no optimizer of the model is distributed.
    """
    found = model_hooks(model)
    if not found:
        name = getattr(model.optimizer, "name", None)
        raise UsageError(
            f"the model must be compiled with a distributed optimizer. Received: {name}, which averages nothing over "
            "ranks. Pass hvdtrain.DistributedOptimizer(optimizer) to model.compile."
        )
    return found
