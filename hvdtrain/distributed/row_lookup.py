"""Looks up the rows of a sharded table: ids travel to the ranks that have their rows, and the rows return.

In the backward pass, the gradients of rows travel as the ids did. A rank so receives the gradients of its rows from all
ranks; the gradient of its shard is their sum.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.graph_names import unique_name
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.weighted_gradients import GradientWeight
from hvdtrain.errors import DataError

_UNKNOWN_ID = "the ids of a table must be from 0 to"


def look_up(
    table: tf.Variable,
    ids: tf.Tensor,
    shard: RowShard,
    collectives: Collectives,
    *,
    name: str,
    dtype: str,
    gradient_weight: GradientWeight = lambda: None,
) -> tf.Tensor:
    """The rows of a table. All ranks must call it, each with its own ids, of which there may be none.

    Each distinct id of a rank is sent once, and its row returns once.

    Args:
        table: this rank's rows.
        ids: integers, shape ``[n]``.
        name: of the table, for messages; the same on every rank.
        dtype: of the result, in which rows are sent.
        gradient_weight: while the backward pass is traced: the weight by which this rank's gradients count.

    Returns:
        Shape ``[n, width]``.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, when it runs: an id is out of range (:func:`unknown_id_error`).
    """
    call = unique_name(f"hvdtrain_rows_{_plain(name)}")
    distinct, positions = tf.unique(ids)
    is_unknown = (distinct < 0) | (distinct >= shard.shape[0])
    # It is sent to all ranks before the ids, so that all raise its error.
    unknown = _first_unknown(distinct, is_unknown)
    distinct = tf.where(is_unknown, tf.zeros_like(distinct), distinct)
    owners = tf.cast(distinct % shard.num_ranks, tf.int32)
    by_owner = tf.dynamic_partition(tf.range(tf.size(distinct)), owners, shard.num_ranks)
    num_sent = tf.stack([tf.size(each) for each in by_owner])
    places = tf.gather(tf.math.invert_permutation(tf.concat(by_owner, 0)), positions)
    rows = distinct // shard.num_ranks
    messages = [part for each in by_owner for part in (unknown, tf.gather(rows, each))]
    received, lengths = collectives.exchange_parts(tf.concat(messages, 0), num_sent + 1, f"{call}_ids")
    asked, num_asked = _without_first_of_each(received, lengths, shard, name), lengths - 1

    @tf.custom_gradient
    def answers(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        answered, _ = collectives.exchange_parts(tf.cast(own, dtype), num_asked, f"{call}_rows")

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            upstream = tf.cast(upstream, own.dtype)
            if (weight := gradient_weight()) is not None:
                upstream *= tf.cast(weight, own.dtype)
            sums = tf.math.unsorted_segment_sum(upstream, places, tf.reduce_sum(num_sent))
            sums = tf.ensure_shape(sums, [None, *shard.shape[1:]])
            return collectives.exchange_parts(sums, num_sent, f"{call}_gradients")[0]

        return tf.gather(answered, places), gradient

    return answers(tf.gather(table, asked))


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


def _without_first_of_each(received: tf.Tensor, lengths: tf.Tensor, shard: RowShard, name: str) -> tf.Tensor:
    """The rows that ranks ask for, once none of them has sent an id that is out of range."""
    firsts = tf.cumsum(lengths, exclusive=True)
    unknown = tf.gather(received, firsts)
    is_row = tf.tensor_scatter_nd_update(
        tf.ones_like(received, tf.bool), firsts[:, tf.newaxis], tf.zeros_like(firsts, tf.bool)
    )
    rank = tf.argmax(tf.cast(unknown != 0, tf.int32))
    check = _assert_known(tf.reduce_all(unknown == 0), unknown[rank], rank, shard.shape[0], name)
    with tf.control_dependencies([check]):
        return tf.boolean_mask(received, is_row)


def _assert_known(
    is_known: tf.Tensor, unknown: tf.Tensor, rank: tf.Tensor | int, num_rows: int, name: str
) -> tf.Operation | None:
    text = f"{_UNKNOWN_ID} {num_rows - 1:,}. Received: {{}} in {name} on rank {{}}. {_REMEDY}"
    return tf.debugging.Assert(is_known, [tf.strings.format(text, [unknown, rank])])


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)
