"""``hvdtrain.layers.ShardedEmbedding``: ``keras.layers.Embedding`` with each row on one rank only."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.initial_seeds import InitialSeed, keep_seed
from hvdtrain.distributed.row_lookup import Table, look_up, require_known
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.shards import mark_part
from hvdtrain.errors import UsageError
from hvdtrain.layers.initial_rows import draw_rows, require_elementwise, seed_of
from hvdtrain.layers.table_sizes import require_memory_for_rows
from hvdtrain.optim.global_loss import step_scope

Combiner: TypeAlias = Literal["sum", "mean"]


@keras.saving.register_keras_serializable("hvdtrain")
class ShardedEmbedding(keras.layers.Embedding):
    """A ``keras.layers.Embedding`` whose table is divided among the ranks: row r is on rank r mod N.

    It trains as the table of one process does, in ``model.fit`` with :func:`hvdtrain.DistributedOptimizer` and in
    :class:`hvdtrain.Trainer`. A rank holds 1/N of the rows, with their part of the optimizer's state, and sends and
    receives the distinct rows that its batch uses. The initial rows depend on the seed, not on the number of ranks. On
    one rank it is a plain embedding.

    All ranks must call the layer equally often, also in ``model.predict`` and ``model.evaluate``: each with the same
    number of batches (:func:`hvdtrain.evaluate` and :func:`hvdtrain.predict` see to that). Batches may be empty. To
    save the model, see :func:`~hvdtrain.layers.whole_tables`.

    Args:
        input_dim: number of rows. An id that is not in ``[0, input_dim)`` raises an error on all ranks.
        output_dim: width of a row.
        embeddings_initializer: one that draws each element by itself.
        mask_zero: as in Keras: whether id 0 is padding that later layers leave out.
        combiner: ``"sum"`` or ``"mean"`` of the rows of a sample, over the last dimension of dense ids or the ragged
            one of a ``tf.RaggedTensor``; zeros for a sample without ids. None: a row for each id.
        padding_id: with ``combiner``: the id that fills up dense ids, and is left out.
        kwargs: as of every layer: ``name``, ``dtype``, ``trainable``.

    Raises:
        UsageError: an argument breaks its rule; or the ranks of the job may change.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        combiner: Combiner | None = None,
        padding_id: int | None = None,
        **kwargs: Any,
    ):
        refused = sorted(set(kwargs) & {"embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank"})
        if refused:
            raise UsageError(
                f"a sharded table has no {refused[0]}, which uses the table as a whole. Received: {refused[0]}. Leave "
                "it out; weight_decay of the optimizer shrinks rows."
            )
        if combiner not in (None, "sum", "mean"):
            raise UsageError(f"combiner must be None, 'sum' or 'mean'. Received: {combiner!r}")
        if combiner is None and padding_id is not None:
            raise UsageError(f"padding_id needs a combiner. Received: {padding_id} without one. Use mask_zero.")
        if combiner is not None and mask_zero:
            raise UsageError("mask_zero excludes combiner, whose result has no mask. Received: both. Use padding_id=0.")
        super().__init__(input_dim, output_dim, embeddings_initializer, mask_zero=mask_zero, **kwargs)
        require_elementwise(self.embeddings_initializer)
        self.supports_jit = False  # XLA cannot compile the exchange of rows.
        self.combiner = combiner
        self.padding_id = padding_id

    def build(self, input_shape: Any = None) -> None:
        """Draws this rank's rows."""
        if self.built:
            return
        ranks = runtime.collectives()
        exclusions.require_compatible(exclusions.facts_from(exclusions.SHARDED_TABLE, *ranks.conditions), known=())
        self._collectives: Collectives = ranks
        self._shard = shard = RowShard((self.input_dim, self.output_dim), ranks.rank, ranks.size)
        require_memory_for_rows(self.name, shard, tf.as_dtype(self.variable_dtype).size)
        seed = InitialSeed(seed_of(self.embeddings_initializer), self._draw)
        self._embeddings = self.add_weight(
            shape=(shard.num_rows, self.output_dim),
            initializer=lambda shape, dtype: self._rows(seed.value, dtype),
            name="embeddings",
            trainable=True,
        )
        if ranks.size > 1:
            mark_part(self._embeddings, shard)
            keep_seed(self._embeddings, seed)

    @property
    def embeddings(self) -> Any:
        """The table, on one rank."""
        if self.built and self._shard.num_ranks > 1:
            raise UsageError(
                f"the table of {self.name!r} is on {self._shard.num_ranks} ranks. Received: a use of it as a whole. "
                "Call the layer with ids, or use keras.layers.Embedding where a model needs the whole table."
            )
        return super().embeddings

    def call(self, inputs: Any) -> Any:
        """The rows of ids, or their sums or means. All ranks must call it."""
        ids, result_of = self.request(inputs)
        (rows,) = rows_of([self], [ids])
        return result_of(rows)

    def request(self, inputs: Any) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
        """The ids of inputs as a vector, and what makes the layer's output from their rows."""
        if isinstance(inputs, tf.SparseTensor):
            raise UsageError(
                f"ids must be dense or a tf.RaggedTensor. Received: a tf.SparseTensor in {self.name!r}. Convert it by "
                "tf.RaggedTensor.from_sparse."
            )
        ids = inputs if isinstance(inputs, tf.RaggedTensor) else tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        if self.combiner is not None:
            return self._pooled_request(ids)
        if isinstance(ids, tf.RaggedTensor):
            return ids.flat_values, ids.with_flat_values
        shape = tf.concat([tf.shape(ids), [self.output_dim]], 0)
        return tf.reshape(ids, [-1]), lambda rows: tf.ensure_shape(
            tf.reshape(rows, shape), [*ids.shape, self.output_dim]
        )

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """As in Keras."""
        shape = input_shape if self.combiner is None else input_shape[:-1]
        return (*shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        """As in Keras."""
        spec = super().compute_output_spec(inputs)
        return spec if self.combiner is None else keras.KerasTensor(spec.shape, dtype=spec.dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer."""
        return {
            **keras.layers.Layer.get_config(self),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "padding_id": self.padding_id,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ShardedEmbedding":
        """Makes the layer from its arguments."""
        layer: ShardedEmbedding = super(keras.layers.Embedding, cls).from_config(config)
        return layer

    def enable_lora(self, *arguments: Any, **named: Any) -> None:
        """Refused."""
        raise UsageError("a sharded table cannot be extended by LoRA, which uses it as a whole. Received: enable_lora.")

    def quantize(self, *arguments: Any, **named: Any) -> None:
        """Refused."""
        raise UsageError("a sharded table cannot be quantized. Received: quantize. Quantize the model that is saved.")

    def save_own_variables(self, store: Any) -> None:
        """Refused on several ranks."""
        self._require_one_rank("saved")
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Refused on several ranks."""
        self._require_one_rank("loaded")
        super().load_own_variables(store)

    def _require_one_rank(self, what: str) -> None:
        if self.built and self._shard.num_ranks > 1:
            raise UsageError(
                f"the table of {self.name!r} is on {self._shard.num_ranks} ranks, and cannot be {what} by one of them. "
                "Save the model in a block of hvdtrain.layers.whole_tables(model), or use hvdtrain.Checkpointer."
            )

    def _pooled_request(self, ids: tf.Tensor | tf.RaggedTensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """The request whose result are the sums or means of the rows of each sample."""
        if isinstance(ids, tf.RaggedTensor):
            if ids.shape.rank != 2:
                raise UsageError(f"ragged ids must have 2 dimensions with a combiner. Received: {ids.shape.rank}")
            flat, samples, outer = ids.flat_values, ids.value_rowids(), ids.nrows()[tf.newaxis]
        else:
            flat, outer = tf.reshape(ids, [-1]), tf.shape(ids)[:-1]
            samples = tf.repeat(tf.range(tf.reduce_prod(outer)), tf.shape(ids)[-1])
        num_samples = tf.reduce_prod(outer)
        if self.padding_id is not None:
            is_id = flat != self.padding_id
            flat, samples = tf.boolean_mask(flat, is_id), tf.boolean_mask(samples, is_id)

        def pooled(rows: tf.Tensor) -> tf.Tensor:
            sums = tf.math.unsorted_segment_sum(rows, samples, num_samples)
            if self.combiner == "mean":
                counts = tf.math.unsorted_segment_sum(tf.ones_like(samples), samples, num_samples)
                sums /= tf.cast(tf.maximum(counts, 1), sums.dtype)[:, tf.newaxis]
            sums = tf.reshape(sums, tf.concat([outer, tf.constant([self.output_dim], outer.dtype)], 0))
            return tf.ensure_shape(sums, [*ids.shape[:-1], self.output_dim])

        return flat, pooled

    def own_table(self) -> Table:
        """What this rank has of the table."""
        return Table(self._embeddings.value, self._shard, self.name)

    def _own_rows(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of a vector of ids, on one rank."""
        known = require_known(ids, self.input_dim, self.name)
        return tf.cast(tf.gather(self._embeddings.value, known), self.compute_dtype)

    def _rows(self, seed: int, dtype: str) -> tf.Tensor:
        return draw_rows(self.embeddings_initializer, seed, self._shard, dtype)

    def _draw(self, seed: int) -> None:
        """Replaces the initial rows by those of another seed."""
        self._embeddings.assign(self._rows(seed, self._embeddings.dtype))


def rows_of(layers: Sequence[ShardedEmbedding], ids: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The rows of equally wide tables, for a vector of ids of each, in one exchange. All ranks must call it.

    Args:
        layers: built, and of the same dtypes.
    """
    first = layers[0]
    if first._shard.num_ranks == 1:
        return [each._own_rows(vector) for each, vector in zip(layers, ids, strict=True)]
    scope = step_scope()
    return look_up(
        [each.own_table() for each in layers],
        ids,
        first._collectives,
        dtype=first.compute_dtype,
        **({} if scope is None else {"gradient_weight": scope.gradient_weight}),
    )
