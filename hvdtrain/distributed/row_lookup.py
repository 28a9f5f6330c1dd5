"""Looks up the rows of sharded tables: ids travel to the ranks that have their rows, and the rows return.

In the backward pass, the gradients of rows travel as the ids did. A rank so receives the gradients of its rows from all
ranks; the gradient of its shard is their sum.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.graph_names import unique_name
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.weighted_gradients import GradientWeight
from hvdtrain.errors import DataError

_UNKNOWN_ID = "the ids of a table must be from 0 to"


@dataclasses.dataclass(frozen=True)
class Table:
    """What this rank has of a sharded table."""

    rows: tf.Variable
    shard: RowShard
    name: str
    """For messages; the same on every rank."""


def look_up(
    tables: Sequence[Table],
    ids: Sequence[tf.Tensor],
    collectives: Collectives,
    *,
    dtype: str,
    gradient_weight: GradientWeight = lambda: None,
) -> list[tf.Tensor]:
    """The rows of equally wide tables, in one exchange. All ranks must call it, each with its own ids, if any.

    Each distinct id of a rank is sent once, and its row returns once.

    Args:
        tables: on the same ranks, and with the same dtype.
        ids: for each table: integers, shape ``[n]``.
        dtype: of the results, in which rows are sent.
        gradient_weight: while the backward pass is traced: the weight by which this rank's gradients count.

    Returns:
        For each table: shape ``[n, width]``.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, when it runs: an id is out of range (:func:`unknown_id_error`).
    """
    call = unique_name(f"hvdtrain_rows_{_plain(tables[0].name)}")
    num_ranks, width = tables[0].shard.num_ranks, tables[0].shard.shape[1:]
    asking = _Asking.for_rows(tables, ids)
    by_owner = tf.dynamic_partition(tf.range(tf.size(asking.owners)), asking.owners, num_ranks)
    num_sent = tf.stack([tf.size(each) for each in by_owner])
    places = tf.gather(tf.math.invert_permutation(tf.concat(by_owner, 0)), asking.positions)
    messages = [part for each in by_owner for part in (asking.unknown, tf.gather(asking.rows, each))]
    received, lengths = collectives.exchange_parts(tf.concat(messages, 0), num_sent + len(tables), f"{call}_ids")
    asked, num_asked = _without_unknown(received, lengths, tables), lengths - len(tables)

    @tf.custom_gradient
    def answers(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        answered, _ = collectives.exchange_parts(tf.cast(own, dtype), num_asked, f"{call}_rows")

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            upstream = tf.cast(upstream, own.dtype)
            if (weight := gradient_weight()) is not None:
                upstream *= tf.cast(weight, own.dtype)
            sums = tf.math.unsorted_segment_sum(upstream, places, tf.reduce_sum(num_sent))
            sums = tf.ensure_shape(sums, [None, *width])
            return collectives.exchange_parts(sums, num_sent, f"{call}_gradients")[0]

        return tf.gather(answered, places), gradient

    return tf.split(answers(_own_rows(tables, asked)), [tf.size(each) for each in ids], num=len(ids))


@dataclasses.dataclass(frozen=True)
class _Asking:
    """The rows that this rank asks for: distinct ones, of all tables in order."""

    owners: tf.Tensor
    """The rank that has each row."""
    rows: tf.Tensor
    """The number of each row on its owner, where the rows of all tables are counted through."""
    positions: tf.Tensor
    """For each id: the number of its row among those that are asked for."""
    unknown: tf.Tensor
    """For each table: the first id that is out of range; 0 if there is none. It is sent to all ranks before the rows,
    so that all raise its error."""

    @classmethod
    def for_rows(cls, tables: Sequence[Table], ids: Sequence[tf.Tensor]) -> "_Asking":
        is_long = any(each.dtype == tf.int64 for each in ids) or _first_rows(tables)[-1] > tf.int32.max
        owners, rows, positions, unknown, count = [], [], [], [], tf.constant(0)
        for table, first_row, each in zip(tables, _first_rows(tables), ids, strict=False):
            distinct, own_positions = tf.unique(tf.cast(each, tf.int64 if is_long else tf.int32))
            is_unknown = (distinct < 0) | (distinct >= table.shard.shape[0])
            unknown.append(_first_unknown(distinct, is_unknown))
            distinct = tf.where(is_unknown, tf.zeros_like(distinct), distinct)
            owners.append(tf.cast(distinct % table.shard.num_ranks, tf.int32))
            rows.append(distinct // table.shard.num_ranks + first_row)
            positions.append(own_positions + count)
            count += tf.size(distinct)
        return cls(*(tf.concat(each, 0) for each in (owners, rows, positions, unknown)))


def _first_rows(tables: Sequence[Table]) -> list[int]:
    """The number of each table's first row on a rank, where the rows of all tables are counted through; and the
    total."""
    return list(itertools.accumulate((each.shard.num_rows for each in tables), initial=0))


def _own_rows(tables: Sequence[Table], asked: tf.Tensor) -> tf.Tensor:
    """This rank's rows with these numbers, in order."""
    if len(tables) == 1:
        return tf.gather(tables[0].rows, asked)
    first_rows = tf.constant(_first_rows(tables)[:-1], asked.dtype)
    numbers = tf.searchsorted(first_rows, asked, side="right") - 1
    places = tf.dynamic_partition(tf.range(tf.size(asked)), numbers, len(tables))
    rows = [
        tf.gather(table.rows, tf.gather(asked, place) - first_row)
        for table, place, first_row in zip(tables, places, tf.unstack(first_rows), strict=True)
    ]
    return tf.dynamic_stitch(places, rows)


def require_known(ids: tf.Tensor, num_rows: int, name: str) -> tf.Tensor:
    """The ids of a table that one process has; raises when it runs, see :func:`unknown_id_error`."""
    is_unknown = (ids < 0) | (ids >= num_rows)
    unknown = _first_unknown(ids, is_unknown)[0]
    with tf.control_dependencies([_assert_known(unknown == 0, unknown, 0, num_rows, name)]):
        return tf.identity(ids)


def unknown_id_error(error: BaseException) -> DataError | None:
    """The error to raise if a step raised this because an id is out of range; otherwise None."""
    text = str(error)
    if not isinstance(error, tf.errors.InvalidArgumentError) or _UNKNOWN_ID not in text:
        return None
    text = text[text.index(_UNKNOWN_ID) :]
    return DataError(text[: text.index(_REMEDY)] + _REMEDY)


def with_unknown_ids(run: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``keras.Model`` that raises the error of :func:`unknown_id_error`."""

    @functools.wraps(run)
    def run_and_explain(*arguments: Any, **named: Any) -> Any:
        try:
            return run(*arguments, **named)
        except tf.errors.InvalidArgumentError as error:
            if (refusal := unknown_id_error(error)) is not None:
                raise refusal from None
            raise

    return run_and_explain


_REMEDY = "Hash ids without a bound by keras.layers.Hashing, or set input_dim to the largest id + 1."


def _first_unknown(ids: tf.Tensor, is_unknown: tf.Tensor) -> tf.Tensor:
    """The first id that is out of range, shape ``[1]``; 0, which is always in range, if there is none."""
    return tf.concat([tf.boolean_mask(ids, is_unknown), tf.zeros([1], ids.dtype)], 0)[:1]


def _without_unknown(received: tf.Tensor, lengths: tf.Tensor, tables: Sequence[Table]) -> tf.Tensor:
    """The rows that ranks ask for, once none of them has sent an id that is out of range."""
    firsts = tf.cumsum(lengths, exclusive=True)[:, tf.newaxis] + tf.range(len(tables))
    unknown = tf.gather(received, firsts)
    is_row = tf.tensor_scatter_nd_update(
        tf.ones_like(received, tf.bool), tf.reshape(firsts, [-1, 1]), tf.zeros(tf.size(firsts), tf.bool)
    )
    checks = []
    for number, table in enumerate(tables):
        of_ranks = unknown[:, number]
        rank = tf.argmax(tf.cast(of_ranks != 0, tf.int32))
        is_known = tf.reduce_all(of_ranks == 0)
        checks.append(_assert_known(is_known, of_ranks[rank], rank, table.shard.shape[0], table.name))
    with tf.control_dependencies(checks):
        return tf.boolean_mask(received, is_row)


def _assert_known(
    is_known: tf.Tensor, unknown: tf.Tensor, rank: tf.Tensor | int, num_rows: int, name: str
) -> tf.Operation | None:
    text = f"{_UNKNOWN_ID} {num_rows - 1:,}. Received: {{}} in {name} on rank {{}}. {_REMEDY}"
    return tf.debugging.Assert(is_known, [tf.strings.format(text, [unknown, rank])])


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)
