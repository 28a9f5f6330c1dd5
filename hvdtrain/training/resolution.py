"""Decides what a configuration leaves open, and refuses what excludes each other, before anything is made from it."""

import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

import keras

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Fact
from hvdtrain.config.fields import facts_of, with_options
from hvdtrain.config.wording import option
from hvdtrain.data import Source, Stream
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of, require_keras_model
from hvdtrain.errors import UsageError
from hvdtrain.layers import ShardedEmbedding
from hvdtrain.optim.pipeline import require_pipeline
from hvdtrain.seams import keras_internals
from hvdtrain.system import devices
from hvdtrain.training.config import StepConfig
from hvdtrain.training.losses import sums_over_batch
from hvdtrain.training.xla import is_chosen

ConfigT_co = TypeVar("ConfigT_co", bound=StepConfig, covariant=True)
ConfigT = TypeVar("ConfigT", bound=StepConfig)


@dataclasses.dataclass(frozen=True)
class Resolved(Generic[ConfigT_co]):
    """A complete configuration."""

    config: ConfigT_co
    jit_compile_is_optional: bool
    """Whether XLA was chosen by default, and is left out of a model that it cannot compile."""
    facts: dict[Fact, str]
    """The conditions of the run."""

    def require_compatible_reduction(self, model: keras.Model) -> None:
        """Raises UsageError if the options, or the model's losses, exclude how its optimizers reduce gradients."""
        reduction = require_pipeline(leaves_of(model)[0]).reduce
        facts = self.facts | facts_of(self.config) | facts_of(reduction.config)
        if reduction.compression is not None:
            facts[exclusions.COMPRESSION] = option("compression", reduction.compression)
        if not sums_over_batch(model, reduction.config.op, self.config.gradient_accumulation_steps):
            facts |= exclusions.facts_from(exclusions.MEAN_LOSS)
        exclusions.require_compatible(facts)


def resolve(
    config: ConfigT,
    model: keras.Model,
    source: Source,
    collectives: Collectives,
    *,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Resolved[ConfigT]:
    """Decides what a configuration leaves open: whether XLA compiles steps, and what follows a NaN.

    Raises:
        UsageError: options, model, data and ranks exclude each other, or the model was not compiled with an optimizer.
    """
    require_keras_model(model)
    if not optimizers_of(model):
        raise UsageError(f"model {model.name!r} must be compiled with an optimizer. Received: a model without one.")
    facts = {**facts_of(config), **_conditions(model, source, config, collectives)}
    exclusions.require_compatible(facts)
    chosen: dict[str, object] = {"jit_compile": is_chosen(model, config, facts)}
    terminates = any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in callbacks)
    if terminates and config.guards.on_nan == "stop":
        chosen["on_nan"] = "ignore"
    return Resolved(with_options(config, chosen), config.jit_compile is None, facts)


def _conditions(model: keras.Model, source: Source, config: StepConfig, collectives: Collectives) -> dict[Fact, str]:
    """The conditions of a run, besides its options."""
    layers = list(keras_internals.FLATTEN_LAYERS.of(model)(include_self=False))
    synchronizes = any(isinstance(each, keras.layers.BatchNormalization) and each.synchronized for each in layers)
    found = exclusions.facts_from(
        *collectives.conditions,
        *([exclusions.STREAM] if isinstance(source, Stream) else []),
        *([exclusions.SHARDED_TABLE] if any(isinstance(each, ShardedEmbedding) for each in layers) else []),
        *([exclusions.EAGER_MODEL] if model.run_eagerly else []),
        *([exclusions.SEVERAL_OPTIMIZERS] if len(leaves_of(model)) > 1 else []),
        *([exclusions.SYNCHRONIZED_LAYERS] if synchronizes and not config.sync_batchnorm else []),
    )
    if devices.is_deterministic():
        found[exclusions.DETERMINISTIC] = str(exclusions.DETERMINISTIC)
    return found
