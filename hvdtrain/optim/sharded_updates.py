"""Makes an optimizer update this rank's part of each variable, with the state of that part alone (ZeRO stage 1).

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", arXiv:1910.02054.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.distributed.optimizers import is_accumulator
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.distributed.shards import Part, mark_part
from hvdtrain.errors import UsageError
from hvdtrain.seams import keras_internals

_ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
    *(keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax, keras.optimizers.Nadam),
    *(keras.optimizers.Lion, keras.optimizers.Ftrl),
)


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is known to update each element of a variable independently."""
    return type(optimizer) in _ELEMENTWISE


def names_of_elementwise() -> str:
    """The optimizers that do, for messages."""
    return ", ".join(each.__name__ for each in _ELEMENTWISE)


def require_elementwise(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer whose state cannot be divided.

    Raises:
        UsageError: it is not known to update each element of a variable independently, or it has state already.
    """
    if not is_elementwise(optimizer):
        raise UsageError(
            f"a sharded optimizer must update each element of a variable by itself: {names_of_elementwise()}. "
            f"Received: {type(optimizer).__name__}, which may need whole variables. Use one of these, or leave "
            f"{option('shard_optimizer', True)} out."
        )
    if optimizer.built:
        raise UsageError(
            f"an optimizer must be sharded before it is built. Received: {optimizer.name}, which has state already. "
            "Make a new one; hvdtrain.Checkpointer restores the state of a sharded or plain one."
        )


def shard_state(optimizer: Any, reduction: ShardedReduction) -> "ShardedUpdates":
    """Makes an elementwise optimizer keep the state of this rank's parts of variables; returns what updates them.

    Its variables are then the parts' state, under their usual names. Accumulated gradients stay whole: they are this
    rank's own, before the reduction. A saved model holds no state of the optimizer.
    """
    updates = ShardedUpdates(optimizer, reduction)
    optimizer.build = updates.build
    optimizer.add_variable_from_reference = updates.add_variable_from_reference
    optimizer.save_own_variables = lambda store: None
    keras_internals.VARIABLE_INDEX.set(optimizer, updates.get_variable_index)
    keras_internals.USE_WEIGHT_DECAY.set(optimizer, updates.use_weight_decay)
    keras_internals.OVERWRITE.set(optimizer, updates.overwrite_with_ema)
    return updates


class ShardedUpdates:
    """The stages ``clip`` to ``average`` on parts of variables; Keras' own methods do the work."""

    def __init__(self, optimizer: Any, reduction: ShardedReduction):
        self._optimizer = optimizer
        self._reduction = reduction
        self._rank, self._num_ranks = reduction.collectives.rank, reduction.collectives.size
        self._parts: dict[str, keras.Variable] = {}
        """By the key of the whole variable: its part while it is updated, empty between steps."""
        self._wholes: dict[str, keras.Variable] = {}
        """By the key of the part."""
        self._keras_build: Callable[..., None] = optimizer.build
        self._keras_add_variable: Callable[..., keras.Variable] = optimizer.add_variable_from_reference
        self._keras_index: Callable[..., int] = keras_internals.VARIABLE_INDEX.of(optimizer)
        self._keras_use_weight_decay: Callable[..., bool] = keras_internals.USE_WEIGHT_DECAY.of(optimizer)
        self._keras_clip: Callable[..., list[tf.Tensor]] = keras_internals.CLIP.of(optimizer)
        self._keras_weight_decay: Callable[..., None] = keras_internals.DECAY.of(optimizer)
        self._keras_update: Callable[..., None] = keras_internals.UPDATE.of(optimizer)
        self._keras_update_ema: Callable[..., None] = keras_internals.AVERAGE.of(optimizer)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self._optimizer.built:
            return
        self._keras_build(variables)
        for variable in variables:
            length = self._part(variable).length
            part = keras.Variable("zeros", shape=(length,), dtype=variable.dtype, trainable=False, name=variable.name)
            self._parts[self._key(variable)], self._wholes[self._key(part)] = part, variable

    def add_variable_from_reference(
        self, reference_variable: keras.Variable, name: str | None = None, initializer: Any = "zeros"
    ) -> keras.Variable:
        if is_accumulator(name or ""):
            return self._keras_add_variable(reference_variable, name=name, initializer=initializer)
        part = self._part(reference_variable)
        variable: keras.Variable = self._optimizer.add_variable(
            shape=(part.length,),
            initializer=initializer,
            dtype=reference_variable.dtype,
            name=f"{reference_variable.path.replace('/', '_')}_{name}",
        )
        mark_part(variable, part)
        return variable

    def get_variable_index(self, variable: Any) -> int:
        return self._keras_index(self._whole(variable))

    def use_weight_decay(self, variable: Any) -> bool:
        return self._keras_use_weight_decay(self._whole(variable))

    def clip(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Clips parts of gradients as Keras clips whole ones."""
        limit = self._optimizer.clipnorm or self._optimizer.global_clipnorm
        if not limit:
            return self._keras_clip(gradients)
        wide = tf.float64 if any(each.dtype == tf.float64 for each in gradients) else tf.float32
        squared = tf.stack([tf.reduce_sum(tf.square(tf.cast(each, wide))) for each in gradients])
        (squared,) = self._reduction.sum_over_ranks([squared], "clip")
        if not self._optimizer.clipnorm:
            squared = tf.fill([len(gradients)], tf.reduce_sum(squared))
        # A non-finite norm yields a non-finite factor.
        factors = tf.unstack(limit / tf.maximum(tf.sqrt(squared), limit))
        return [each * tf.cast(factor, each.dtype) for each, factor in zip(gradients, factors, strict=True)]

    def decay(self, variables: Sequence[keras.Variable]) -> None:
        self._refresh(variables)
        self._keras_weight_decay([self._parts[self._key(each)] for each in variables])

    def update(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable], learning_rate: Any) -> None:
        parts = [self._parts[self._key(each)] for each in variables]
        self._keras_update(gradients, parts, learning_rate)
        wholes = self._gather([part.value.read_value() for part in parts], variables, "variable")
        for variable, value in zip(variables, wholes, strict=True):
            variable.assign(value)
        for part in parts:
            _free(part)

    def average(self, variables: Sequence[keras.Variable]) -> None:
        self._keras_update_ema([self._part(each).of(each.value) for each in variables])

    def overwrite_with_ema(self, variables: Sequence[keras.Variable]) -> None:
        averages = keras_internals.EMA.of(self._optimizer)
        kept = [(v, average) for v, average in zip(variables, averages, strict=True) if average is not None]
        wholes = self._gather([average.value for _, average in kept], [v for v, _ in kept], "average")
        for (variable, _), value in zip(kept, wholes, strict=True):
            variable.assign(value)

    def _gather(self, parts: Sequence[tf.Tensor], variables: Sequence[Any], place: str) -> list[tf.Tensor]:
        return self._reduction.gather(parts, [tuple(each.shape) for each in variables], place)

    def _refresh(self, variables: Sequence[keras.Variable]) -> None:
        """Sets parts to the values of their variables, which others may have assigned: a callback, a constraint."""
        for variable in variables:
            _set(self._parts[self._key(variable)], self._part(variable).of(variable.value))

    def _part(self, variable: keras.Variable) -> Part:
        return Part(tuple(variable.shape), self._rank, self._num_ranks)

    def _whole(self, variable: Any) -> Any:
        return self._wholes.get(self._key(variable), variable)

    def _key(self, variable: Any) -> str:
        key: str = keras_internals.VARIABLE_KEY.of(self._optimizer)(variable)
        return key


def _free(variable: keras.Variable) -> None:
    """Frees the memory of a variable until it is next set."""
    # TensorFlow refuses a different shape unless the shape is known only when the operation runs.
    _set(variable, tf.compat.v1.placeholder_with_default(tf.zeros([0], variable.value.dtype), [None]))


def _set(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a value of any shape."""
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
