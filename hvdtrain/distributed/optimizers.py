"""The optimizers of a model: its own, those among its attributes, and those inside wrappers."""

import functools
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.seams import horovod_internals

_REPLICATING = (
    *(tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.TPUStrategy),
    *(tf.distribute.ParameterServerStrategy, tf.distribute.experimental.CentralStorageStrategy),
)
"""TensorFlow's strategies that distribute variables themselves."""


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers that a model trains with.

    A model with its own ``train_step`` may keep several, as attributes. ``compile()`` without an argument then
    adds an RMSprop that nothing uses: it is left out.
    """
    own = getattr(model, "optimizer", None)
    others = [each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer) and each is not own]
    others = list({id(each): each for each in others}.values())
    if own is None or (others and _is_default(own)):
        return others
    return [own, *others]


def build_optimizer(model: keras.Model) -> None:
    """Creates the variables of a model's only optimizer; which variables one of several trains is not known here."""
    own = getattr(model, "optimizer", None)  # A model that is not compiled has no such attribute.
    if own is not None and optimizers_of(model) == [own] and not own.built:
        own.build(model.trainable_variables)


def _is_default(optimizer: keras.optimizers.Optimizer) -> bool:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # added by compile() for mixed_float16
        optimizer = optimizer.inner_optimizer
    if type(optimizer) is not keras.optimizers.RMSprop:
        return False
    with tf.init_scope():  # The configuration holds the value of a variable.
        return {**optimizer.get_config(), "name": None} == _default_config()


@functools.cache
def _default_config() -> dict[str, Any]:
    """The configuration of the optimizer that compile() creates without an argument."""
    return {**keras.optimizers.RMSprop(name="default").get_config(), "name": None}


def require_keras_model(model: object) -> None:
    """Refuses models of another Keras, and those of a strategy of TensorFlow.

    Raises:
        UsageError: it is not a model of Keras 3, or TensorFlow distributes it.
    """
    if not isinstance(model, keras.Model):
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise UsageError(f"model must be a model of Keras 3. Received: {name}.{_hint_at_keras_2(model)}")
    _require_no_strategy(model.distribute_strategy)


def require_plain_optimizer(optimizer: object) -> None:
    """Refuses optimizers of another Keras, those that Horovod has wrapped, and the scope of a strategy of TensorFlow.

    Raises:
        UsageError: it is not a plain optimizer of Keras 3, or TensorFlow would distribute it.
    """
    _require_no_strategy(tf.distribute.get_strategy())
    if not isinstance(optimizer, keras.optimizers.Optimizer) or is_horovods_own(optimizer):
        hint = _hint_at_keras_2(optimizer) or " Pass the plain one."
        raise UsageError(
            f"optimizer must be an optimizer of Keras 3 that Horovod has not wrapped. Received: {optimizer!r}.{hint}"
        )


def _require_no_strategy(strategy: tf.distribute.Strategy) -> None:
    if isinstance(strategy, _REPLICATING):
        raise UsageError(
            "models must be made outside of the strategies of tf.distribute: each process trains on its own device, "
            f"and hvdtrain averages over processes. Received: {type(strategy).__name__}. Leave out its scope."
        )


def _hint_at_keras_2(value: object) -> str:
    if not type(value).__module__.startswith("tf_keras."):
        return ""
    return (
        " Models of tf-keras (Keras 2, TF_USE_LEGACY_KERAS=1) train with the optimizers of tf-keras and Horovod's own "
        "DistributedOptimizer."
    )


def is_horovods_own(optimizer: object) -> bool:
    """Whether an optimizer was made by Horovod's DistributedOptimizer, which averages nothing under Keras 3."""
    return all(seam.is_in(optimizer) for seam in horovod_internals.OWN_OPTIMIZER)


def leaves_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers that apply a model's gradients."""
    return [leaf for each in optimizers_of(model) for leaf in leaves(each)]


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of all optimizers of a model."""
    return [variable for each in optimizers_of(model) for variable in each.variables]


def is_accumulator(name: str) -> bool:
    """Whether a variable of an optimizer holds gradients of micro-batches, which each rank accumulates by itself."""
    return "gradient_accumulator" in name


def leaves(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizer itself, or those inside a LossScaleOptimizer or MultiOptimizer.

    Raises:
        UsageError: it is a MultiOptimizer that is not built.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)  # keras.optimizers.MultiOptimizer, from Keras 3.15 on
    if not isinstance(inner, list):
        return [optimizer]
    if not inner:
        raise UsageError(
            "a MultiOptimizer made from a function has no optimizers before it is built. Call "
            "optimizer.build(model.trainable_variables) before DistributedOptimizer(optimizer)."
        )
    return [leaf for each in inner for leaf in leaves(each)]
