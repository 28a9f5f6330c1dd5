"""Ranks that have run out of batches answer the lookups of others in sharded tables."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.shards import has_tables
from hvdtrain.errors import UsageError


class IdleLookups:
    """Runs a step of a model for an empty batch, as often as the rank with the most batches runs it for its own.

    Args:
        step: the model's ``test_step`` or ``predict_step``.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], Any], collectives: Collectives):
        self._model = model
        self._collectives = collectives
        self._run = tf.function(tf.autograph.experimental.do_not_convert(step), reduce_retracing=True)
        if model.run_eagerly:
            self._run = step
        self._most = 0

    @property
    def are_needed(self) -> bool:
        """Whether ranks look up rows of each other."""
        return self._collectives.size > 1 and has_tables(self._model)

    def begin(self, num_batches: int) -> None:
        """Before the first batch; all ranks must call it if lookups are needed.

        Args:
            num_batches: of this rank.
        """
        self._most = max(self._collectives.allgather(num_batches)) if self.are_needed else 0

    def end(self, num_made: int, element_spec: Any) -> None:
        """After the last batch of this rank.

        Args:
            num_made: batches that this rank has made.
            element_spec: of a batch, as the step receives it.
        """
        if self._most <= num_made:
            return
        batch = tf.nest.map_structure(_empty, element_spec)
        metrics = [(variable, variable.numpy()) for variable in self._model.metrics_variables]
        for _ in range(self._most - num_made):
            self._run(batch)
        for variable, value in metrics:
            variable.assign(value)  # The loss of no samples is not a number.


def _empty(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *[each or 1 for each in spec.shape[spec.ragged_rank + 1 :]]], spec.dtype)
        for _ in range(spec.ragged_rank):
            values = tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype))
        return values
    if not isinstance(spec, tf.TensorSpec):
        raise UsageError(
            f"inputs of a model with sharded tables must be dense or ragged. Received: {type(spec).__name__}."
        )
    return tf.zeros([0, *[each or 1 for each in spec.shape[1:]]], spec.dtype)
