"""What happens to a gradient, from the loss to the variables.

Read :class:`GradientPipeline` from top to bottom. ``optim/keras_calls.py`` is where Keras calls the stages.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, values_of
from hvdtrain.distributed.optimizers import leaves, leaves_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.epoch_steps import EpochSteps
from hvdtrain.optim.equal_start import EqualStart
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.loop_replicas import LoopReplicas
from hvdtrain.optim.step_reduction import StepReduction

OwnGradients = Sequence[Gradient | None]
Variables = Sequence[keras.Variable]


class Check(Protocol):
    """Decides from the reduced gradients whether a step is made, the same on every rank."""

    applies: tf.Variable | None
    """If not None: whether the variables are updated. A check without it raises instead."""

    def __call__(self, reduced: ReducedGradients, variables: Variables) -> list[Gradient]:
        """The gradients to apply."""


class NoCheck:
    """Applies every gradient."""

    applies: tf.Variable | None = None

    def __call__(self, reduced: ReducedGradients, variables: Variables) -> list[Gradient]:
        return reduced.gradients


def _unchanged(loss: tf.Tensor) -> tf.Tensor:
    return loss


def _unmarked(gradients: OwnGradients, was_weighed: bool) -> OwnGradients:
    return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPipeline:
    """The stages that the gradients of one optimizer pass, in order. Each sees what the one before it returns.

    A pipeline never changes. A mode that needs another stage traces its steps in the scope (:func:`in_scope`) of
    another pipeline, made by ``dataclasses.replace``.
    """

    weigh: Callable[[tf.Tensor], tf.Tensor] = _unchanged
    """Weighs a micro-batch's loss, so that the mean over ranks is the mean over samples. The backward pass follows."""
    mark: Callable[[OwnGradients, bool], OwnGradients] = _unmarked
    """Writes a loss that is not finite into a gradient, for the reduction to carry to all ranks; also receives whether
    ``weigh`` was called."""
    divert: Callable[[OwnGradients, Variables | None], None] | None = None
    """If not None, receives the gradients and their variables, and the path ends here."""
    # Keras adds them to those of earlier micro-batches (gradient_accumulation_steps); what follows happens once a step.
    start: EqualStart | None = None
    """At the first reduction: requires that replicas are equal."""
    replicas: LoopReplicas
    """At later ones, in a loop of the program's own: the same."""
    reduce: StepReduction
    """Reduces the gradients over ranks."""
    check: Check = dataclasses.field(default_factory=NoCheck)
    """Measures the reduced gradients, and decides whether the step is made."""
    clip: Callable[[list[Gradient], Variables], list[Gradient]]
    """Keras' clipping."""
    decay: Callable[[Variables], None]
    """Keras' weight decay."""
    update: Callable[[Sequence[Gradient], Variables, Any], None]
    """Keras' update of the variables and of the optimizer's state; receives the learning rate too."""
    average: Callable[[Variables], None]
    """The update of the exponential moving average (EMA) of the variables."""
    steps: EpochSteps
    """Counts the steps of ``model.fit``, if it is active."""
    batches: KeptBatch
    """Keeps the batch of a step of ``model.fit`` for a check after it."""


@dataclasses.dataclass
class Applied:
    """The gradients that one optimizer applies while a step is traced."""

    optimizer: keras.optimizers.Optimizer
    variables: Variables
    """Those that have a gradient."""
    checked: Sequence[tf.Tensor] = ()
    """One of the checked gradients, which exists if the step may be made."""
    is_reduced: bool = False


@dataclasses.dataclass
class Scope:
    """The pipelines of a block, and the gradients applied in it."""

    pipelines: Mapping[int, GradientPipeline]
    """By the identity of the optimizer that applies gradients."""
    applied: list[Applied] = dataclasses.field(default_factory=list)
    """Shared with the scopes around it."""
    weighed: list[Any] = dataclasses.field(default_factory=list)
    """The losses that were weighed, as tapes differentiate them, and their gradients; shared likewise."""
    replacement: "Replacement | None" = None
    """Of the pipelines of all other optimizers."""


Replacement = Callable[[keras.optimizers.Optimizer, GradientPipeline], GradientPipeline]
"""Returns what an optimizer has instead of its own pipeline."""
Pipelines = Sequence[tuple[keras.optimizers.Optimizer, GradientPipeline]]
"""The pipelines of optimizers that apply gradients."""
_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("hvdtrain_pipelines", default=None)


@contextlib.contextmanager
def in_scope(pipelines: Pipelines) -> Iterator[Scope]:
    """In the block, optimizers have these pipelines instead of their own: trace a step in it."""
    outer = _scope.get()
    found = {id(leaf): pipeline for leaf, pipeline in pipelines}
    scope = Scope(found) if outer is None else dataclasses.replace(outer, pipelines={**outer.pipelines, **found})
    with _as_current(scope):
        yield scope


@contextlib.contextmanager
def replaced_pipelines(replacement: Replacement) -> Iterator[None]:
    """In the block, every optimizer uses a replacement for its pipeline, including optimizers not known here."""
    with _as_current(Scope({}, replacement=replacement)):
        yield


@contextlib.contextmanager
def _as_current(scope: Scope) -> Iterator[Scope]:
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def current_scope() -> Scope | None:
    """The innermost scope; None outside of all."""
    return _scope.get()


def note_weighed_loss(loss: tf.Tensor) -> None:
    """Notes a loss that an optimizer has weighed and scaled."""
    if (scope := _scope.get()) is not None:
        scope.weighed.append(loss)


def note_gradients(targets: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Notes the gradients that a tape returns, if they are those of a loss that was weighed."""
    scope = _scope.get()
    if scope is not None and any(target is loss for target in targets for loss in scope.weighed):
        scope.weighed += gradients


def are_of_weighed_losses(gradients: OwnGradients) -> bool:
    """Whether all of these gradients are as tapes have returned them for losses that were weighed, by any optimizer."""
    scope = _scope.get()
    noted = set() if scope is None else {id(each) for each in scope.weighed}
    return any(each is not None for each in gradients) and all(each is None or id(each) in noted for each in gradients)


def keep_pipeline(optimizer: keras.optimizers.Optimizer, pipeline: GradientPipeline) -> None:
    """Makes a pipeline an optimizer's own."""
    # Past Keras' __setattr__, which would look for variables in it.
    vars(optimizer)["hvdtrain_pipeline"] = pipeline


def pipeline_of(optimizer: keras.optimizers.Optimizer) -> GradientPipeline | None:
    """The pipeline of a distributed optimizer, or of the first one inside it; None for a plain one."""
    leaf = leaves(optimizer)[0]
    scope = _scope.get()
    if scope is not None and id(leaf) in scope.pipelines:
        return scope.pipelines[id(leaf)]
    own = vars(leaf).get("hvdtrain_pipeline")
    return own if own is None or scope is None or scope.replacement is None else scope.replacement(leaf, own)


def require_pipeline(optimizer: keras.optimizers.Optimizer) -> GradientPipeline:
    """The pipeline of an optimizer that is known to be distributed."""
    pipeline = pipeline_of(optimizer)
    assert pipeline is not None, optimizer
    return pipeline


def pipelines_of(model: keras.Model) -> Pipelines:
    """The pipelines of the distributed optimizers that a model trains with."""
    return [(leaf, pipeline) for leaf in leaves_of(model) if (pipeline := pipeline_of(leaf)) is not None]


def require_pipelines(model: keras.Model) -> Pipelines:
    """The same pipelines; there must be at least one.

    Raises:
        UsageError: no optimizer of the model is distributed.
    """
    found = pipelines_of(model)
    if not found:
        name = getattr(model.optimizer, "name", None)
        raise UsageError(
            f"the model must be compiled with a distributed optimizer. Received: {name}, which averages nothing over "
            "ranks. Pass hvdtrain.DistributedOptimizer(optimizer) to model.compile."
        )
    return found


def reduce_check_and_clip(
    pipeline: GradientPipeline, applied: Applied, gradients: Sequence[Gradient]
) -> list[Gradient]:
    """The stages from the reduction to clipping."""
    applied.is_reduced = True
    reduced = pipeline.reduce(applied.variables, gradients)
    checked = pipeline.check(reduced, applied.variables)
    applied.checked = [values_of(each) for each in checked[:1]]
    return pipeline.clip(checked, applied.variables)


def unless_skipped(pipeline: GradientPipeline, action: Callable[[], None]) -> None:
    """Runs a stage unless the check skips the step."""
    if pipeline.check.applies is None:
        action()
    else:
        keras.ops.cond(pipeline.check.applies.read_value(), action, lambda: None)


def when_checked(pipeline: GradientPipeline, applied: Applied, action: Callable[[], None]) -> None:
    """Runs a stage after the check, unless that skips the step: a step that raises has updated nothing.

    Weight decay does not depend on gradients, nor does Nadam's product of momenta.
    """
    with tf.control_dependencies(applied.checked):
        unless_skipped(pipeline, action)
