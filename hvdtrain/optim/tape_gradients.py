"""Gradients that a ``train_step`` uses before it applies them: they are reduced where the tape returns them.

By default a gradient is reduced when an optimizer applies it. A ``train_step`` may clip it before, perturb the weights
by it (sharpness-aware minimization), add it to those of other micro-batches or log its norm: one process would use the
gradient of the whole batch there, and so must each rank. Which gradients are used shows when the step is traced.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Option
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer, is_sparse
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.distributed.shards import has_tables
from hvdtrain.errors import UsageError
from hvdtrain.optim.global_loss import UncompilableLossError
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.optim.own_loops import note_gradients_by
from hvdtrain.optim.pipeline import GradientPipeline, Pipelines, in_scope, note_gradients, pipelines_of
from hvdtrain.optim.step_reduction import StepReduction, already_reduced

OnReturn = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Receives what a tape was asked to differentiate by and the gradients, flat; returns the gradients to use."""

_on_return: contextvars.ContextVar[OnReturn | None] = contextvars.ContextVar("hvdtrain_tape_gradients", default=None)
_are_used_of: "weakref.WeakKeyDictionary[keras.Model, bool]" = weakref.WeakKeyDictionary()
_reducers: "weakref.WeakKeyDictionary[keras.Model, _TapeReducer]" = weakref.WeakKeyDictionary()

_gradient_here = tf.GradientTape.gradient


def _gradient(self: tf.GradientTape, target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
    gradients = _gradient_here(self, target, sources, *arguments, **named)
    note_gradients(tf.nest.flatten(target), tf.nest.flatten(gradients))
    note_gradients_by(tf.nest.flatten(sources))
    on_return = _on_return.get()
    if on_return is None:
        return gradients
    flat = on_return(tf.nest.flatten(sources), tf.nest.flatten(gradients))
    return tf.nest.pack_sequence_as(gradients, flat)


tf.GradientTape.gradient = _gradient


@contextlib.contextmanager
def reduced_if_used(
    model: keras.Model, train_step: Callable[[Any], Any], data: Any, excluded_by: Sequence[Option] = ()
) -> Iterator[None]:
    """In the block, the ``train_step`` is traced or run; if it uses gradients, tapes return reduced ones.

    Args:
        excluded_by: the options that keep ranks from communicating before the update.

    Raises:
        UsageError: an option excludes that.
    """
    pipelines = pipelines_of(model)
    reduces = any(pipeline.reduce.collectives.reduces for _, pipeline in pipelines)
    if not reduces or not _is_own(train_step) or not _are_used(model, train_step, data):
        yield
        return
    if excluded_by:
        refusal = exclusions.refusal_of({each: str(each) for each in (excluded_by[0], exclusions.USED_GRADIENTS)})
        raise UncompilableLossError(refusal) if excluded_by[0] == exclusions.JIT_COMPILE else UsageError(refusal)
    if has_tables(model):
        raise UsageError(
            exclusions.refusal_of(exclusions.facts_from(exclusions.SHARDED_TABLE, exclusions.USED_GRADIENTS))
        )
    if model not in _reducers:
        _reducers[model] = _TapeReducer()
    with _reducers[model].active(pipelines):
        yield


def _is_own(train_step: Callable[[Any], Any]) -> bool:
    """Whether a ``train_step`` is not Keras' own, which applies gradients as the tape returns them."""
    return getattr(train_step, "__func__", None) is not keras.Model.train_step


def forget(model: keras.Model) -> None:
    """Examines the model's ``train_step`` again: it may have been replaced."""
    _are_used_of.pop(model, None)


def _are_used(model: keras.Model, train_step: Callable[[Any], Any], data: Any) -> bool:
    if model.run_eagerly:
        return True  # It cannot be traced, and what it does with gradients is not known before.
    if model not in _are_used_of:
        _are_used_of[model] = _examine(model, train_step, data)
    return _are_used_of[model]


def _examine(model: keras.Model, train_step: Callable[[Any], Any], data: Any) -> bool:
    """Traces a ``train_step``, without running it, to find whether it uses gradients other than by applying them."""
    found: dict[int, tuple[Gradient, int]] = {}
    applied: set[int] = set()

    def note(sources: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        # A copy, because a backward pass may return one tensor as the gradients of several variables, or use it.
        kept = [None if each is None else _copied(each) for each in gradients]
        for source, each in zip(sources, kept, strict=True):
            if each is not None and _is_variable(source):
                found[id(each)] = each, _num_uses(each)
        return kept

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        applied.update(id(each) for each in grads)

    def trace(data: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(in_scope([(leaf, _without_effect(pipeline)) for leaf, pipeline in pipelines_of(model)]))
            for optimizer in optimizers_of(model):
                stack.callback(replace_method(optimizer, "apply", apply))
            train_step(data)

    token = _on_return.set(note)
    try:
        spec = tf.nest.map_structure(tf.type_spec_from_value, data)
        tf.function(tf.autograph.experimental.do_not_convert(trace)).get_concrete_function(spec)
    finally:
        _on_return.reset(token)
    return any(key not in applied or _num_uses(each) > before for key, (each, before) in found.items())


def _is_variable(source: Any) -> bool:
    """Whether a tape differentiates by a variable; a gradient by inputs is one of this rank's samples."""
    return isinstance(source, keras.Variable | tf.Variable)


def _without_effect(pipeline: GradientPipeline) -> GradientPipeline:
    return dataclasses.replace(
        pipeline, weigh=lambda loss: loss, mark=lambda gradients, was_weighed: gradients, divert=None, start=None
    )


def _copied(gradient: Gradient) -> Gradient:
    if is_sparse(gradient):
        return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def _num_uses(gradient: Gradient) -> int:
    return len((gradient.values if is_sparse(gradient) else gradient).consumers())


class _TapeReducer:
    """Reduces what tapes return in one model's step, by the pipeline of its first optimizer."""

    def __init__(self) -> None:
        self._more: list[GradientReducer] = []
        """The reducers of the second and later gradients of a step: each has a name, the same on every rank."""
        self._num_returned = 0
        self._pipeline: GradientPipeline | None = None
        self._was_weighed = False

    @contextlib.contextmanager
    def active(self, pipelines: Pipelines) -> Iterator[None]:
        """In the block, a step is traced or run."""
        self._num_returned, self._was_weighed, self._pipeline = 0, False, pipelines[0][1]
        token = _on_return.set(self._reduce)
        try:
            with in_scope([(leaf, self._applying(pipeline)) for leaf, pipeline in pipelines]):
                yield
        finally:
            _on_return.reset(token)
            self._pipeline = None

    def _applying(self, pipeline: GradientPipeline) -> GradientPipeline:
        """The pipeline of gradients that are reduced already; parts of a sharded optimizer are reduced once more."""

        def weigh(loss: tf.Tensor) -> tf.Tensor:
            self._was_weighed = True
            return pipeline.weigh(loss)

        reduction = pipeline.reduce if pipeline.reduce.sharded is not None else already_reduced(pipeline.reduce)
        return dataclasses.replace(
            pipeline, weigh=weigh, mark=lambda gradients, was_weighed: gradients, reduce=reduction
        )

    def _reduce(self, sources: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        pipeline = self._pipeline
        assert pipeline is not None
        found = [i for i, each in enumerate(gradients) if each is not None and _is_variable(sources[i])]
        if not found:
            return gradients
        marked = pipeline.mark([gradients[i] for i in found], self._was_weighed)
        self._was_weighed = False
        reduced = self._next_reduction(pipeline.reduce)([sources[i] for i in found], marked).gradients
        result = list(gradients)
        for i, each in zip(found, reduced, strict=True):
            result[i] = each
        return result

    def _next_reduction(self, reduction: StepReduction) -> StepReduction:
        number = self._num_returned
        self._num_returned += 1
        if number == 0 and reduction.sharded is None:
            return reduction
        if number >= len(self._more):
            config = dataclasses.replace(reduction.config, shard_optimizer=False, groups=None)
            self._more += [reduction.collectives.gradient_reducer(config) for _ in range(number + 1 - len(self._more))]
        return dataclasses.replace(reduction, reducer=self._more[number])
