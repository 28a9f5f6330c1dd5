"""``hvdtrain.layers.EmbeddingGroup``: several embeddings, of which sharded ones exchange their rows together."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras

from hvdtrain.errors import UsageError
from hvdtrain.layers.sharded_embedding import ShardedEmbedding, rows_of

Tables: TypeAlias = Sequence[keras.layers.Embedding] | Mapping[str, keras.layers.Embedding]


@keras.saving.register_keras_serializable("hvdtrain")
class EmbeddingGroup(keras.layers.Layer):
    """Several embeddings. Those that are sharded, and equally wide, exchange their rows in one message::

        users = hvdtrain.layers.ShardedEmbedding(10_000_000, 64)
        items = hvdtrain.layers.ShardedEmbedding(1_000_000, 64, combiner="mean")
        rows = hvdtrain.layers.EmbeddingGroup({"user": users, "items": items})({"user": user_ids, "items": item_ids})

    The rows are those that each layer returns by itself. There is one exchange for each width and dtype. A layer may
    occur several times: its table is then shared.

    Args:
        tables: a list or dict of :class:`ShardedEmbedding` and ``keras.layers.Embedding``. The group is called with
            a list or dict of ids, and returns one of rows.
        kwargs: as of every layer: ``name``, ``dtype``, ``trainable``.

    Raises:
        UsageError: there is no table, or something else among them.
    """

    def __init__(self, tables: Tables, **kwargs: Any):
        super().__init__(**kwargs)
        others = [each for each in _values(tables) if not isinstance(each, keras.layers.Embedding)]
        if others or not tables:
            raise UsageError(
                "a group must consist of hvdtrain.layers.ShardedEmbedding and keras.layers.Embedding, at least one. "
                f"Received: {type(others[0]).__name__ if others else 'none'}."
            )
        self.supports_jit = False  # XLA cannot compile the exchange of rows.
        self.tables = dict(tables) if isinstance(tables, Mapping) else list(tables)

    def build(self, input_shape: Any = None) -> None:
        """Builds the tables."""
        for each in _values(self.tables):
            if not each.built:
                each.build(None)
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The rows of all tables. All ranks must call it."""
        tables, ids = _values(self.tables), self._in_order(inputs)
        results: list[Any] = [None] * len(tables)
        requests = {}
        for i, table in enumerate(tables):
            if isinstance(table, ShardedEmbedding):
                requests[i] = table.request(ids[i])
            else:
                results[i] = table(ids[i])

        def kind(i: int) -> tuple[Any, ...]:
            return tables[i].output_dim, tables[i].compute_dtype, tables[i].variable_dtype

        for _, group in itertools.groupby(sorted(requests, key=kind), kind):
            numbers = list(group)
            rows = rows_of([tables[i] for i in numbers], [requests[i][0] for i in numbers])
            for i, each in zip(numbers, rows, strict=True):
                results[i] = requests[i][1](each)
        return self._as_tables(results)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """The masks of the tables."""
        pairs = zip(_values(self.tables), self._in_order(inputs), strict=True)
        return self._as_tables([table.compute_mask(ids) for table, ids in pairs])

    def compute_output_spec(self, inputs: Any) -> Any:
        """The specs of the tables' outputs."""
        pairs = zip(_values(self.tables), self._in_order(inputs), strict=True)
        return self._as_tables([table.compute_output_spec(ids) for table, ids in pairs])

    def _in_order(self, inputs: Any) -> list[Any]:
        """The ids of each table."""
        expected: Any
        received: Any
        if isinstance(self.tables, Mapping):
            expected, received = sorted(self.tables), sorted(inputs) if isinstance(inputs, Mapping) else type(inputs)
            found = [inputs[name] for name in self.tables] if expected == received else None
        else:
            expected, received = len(self.tables), len(inputs) if isinstance(inputs, list | tuple) else type(inputs)
            found = list(inputs) if expected == received else None
        if found is None:
            what = "a dict of ids for" if isinstance(self.tables, Mapping) else "a list of ids, as long as its tables:"
            raise UsageError(f"a group must be called with {what} {expected}. Received: {received}")
        return found

    def _as_tables(self, results: list[Any]) -> Any:
        """One result for each table, in a list or dict as the tables are."""
        return dict(zip(self.tables, results, strict=True)) if isinstance(self.tables, Mapping) else results

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer; a table that occurs several times is saved once."""
        once = list({id(each): each for each in _values(self.tables)}.values())
        numbers = [next(i for i, each in enumerate(once) if each is table) for table in _values(self.tables)]
        return {
            **super().get_config(),
            "tables": [keras.saving.serialize_keras_object(each) for each in once],
            "numbers": self._as_tables(numbers),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "EmbeddingGroup":
        """Makes the layer from its arguments."""
        config = dict(config)
        once = [keras.saving.deserialize_keras_object(each) for each in config.pop("tables")]
        numbers = config.pop("numbers")
        if isinstance(numbers, Mapping):
            return cls({name: once[i] for name, i in numbers.items()}, **config)
        return cls([once[i] for i in numbers], **config)


def _values(tables: Tables) -> list[keras.layers.Embedding]:
    return list(tables.values() if isinstance(tables, Mapping) else tables)
