"""The gradients of sharded tables: each rank has those of its rows, which are the sums over all ranks already."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.fields import facts_of
from hvdtrain.config.wording import option
from hvdtrain.distributed.gradient_reduction import Gradient, values_of, with_unique_rows, with_values
from hvdtrain.distributed.shards import mark_part, row_shard_of
from hvdtrain.distributed.step_sums import StepSums
from hvdtrain.errors import UsageError
from hvdtrain.optim.sharded_updates import is_elementwise, names_of_elementwise
from hvdtrain.optim.step_reduction import StepReduction

_add_variable_here = keras.optimizers.Optimizer.add_variable_from_reference


def _add_marked_variable(self: Any, reference_variable: Any, *arguments: Any, **named: Any) -> keras.Variable:
    """Marks the state of a table's rows, which is on the same rank as the rows."""
    variable: keras.Variable = _add_variable_here(self, reference_variable, *arguments, **named)
    if (shard := row_shard_of(reference_variable)) is not None:
        mark_part(variable, shard)
    return variable


keras.optimizers.Optimizer.add_variable_from_reference = _add_marked_variable


def are_tables(variables: Sequence[Any]) -> list[bool]:
    """Which of the variables are sharded tables."""
    return [row_shard_of(variable) is not None for variable in variables]


def require_usable_with_tables(optimizer: Any, variables: Sequence[Any], reduction: StepReduction) -> None:
    """Refuses optimizers and reductions that cannot train sharded tables, if there is one among the variables.

    Raises:
        UsageError: the optimizer uses whole variables, an option excludes sharded tables, or not all ranks that have
            rows reduce gradients together.
    """
    shard = next((shard for each in variables if (shard := row_shard_of(each)) is not None), None)
    if shard is None:
        return
    facts = facts_of(reduction.config) | exclusions.facts_from(exclusions.SHARDED_TABLE)
    if reduction.compression is not None:
        facts[exclusions.COMPRESSION] = option("compression", reduction.compression)
    if reduction.local_variables():
        facts |= exclusions.facts_from(exclusions.LOCAL_LAYERS)
    exclusions.require_compatible(facts, known=())
    if not is_elementwise(optimizer):
        raise UsageError(
            "an optimizer of sharded tables must update each element of a variable by itself: "
            f"{names_of_elementwise()}. Received: {type(optimizer).__name__}. Use one of these."
        )
    if reduction.collectives.size not in (1, shard.num_ranks):
        raise UsageError(
            "all ranks that have rows of a table must train it together. Received: a reduction over "
            f"{reduction.collectives.size} of {shard.num_ranks} ranks. Leave collectives out."
        )


def clip_with_tables(optimizer: Any, sums: StepSums, clip: Callable[[Sequence[Gradient]], list[Gradient]]) -> Any:
    """Keras' clipping, whose norms are those of whole tables.

    Args:
        sums: over the ranks that have rows.
        clip: Keras' own.
    """

    def clip_all(gradients: Sequence[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        is_table = are_tables(variables)
        limit = optimizer.clipnorm or optimizer.global_clipnorm
        if not limit or not any(is_table):
            return clip(gradients)
        unique = [with_unique_rows(each) for each in gradients]
        wide = tf.float64 if any(each.dtype == tf.float64 for each in unique) else tf.float32
        squared = [tf.reduce_sum(tf.square(tf.cast(values_of(each), wide))) for each in unique]
        of_tables = iter(sums([each for each, table in zip(squared, is_table, strict=True) if table], "clip"))
        squared = [next(of_tables) if table else each for each, table in zip(squared, is_table, strict=True)]
        if not optimizer.clipnorm:
            squared = [tf.add_n(squared)] * len(squared)
        # A non-finite norm yields a non-finite factor.
        factors = [limit / tf.maximum(tf.sqrt(each), limit) for each in squared]
        return [
            with_values(each, values_of(each) * tf.cast(factor, each.dtype))
            for each, factor in zip(unique, factors, strict=True)
        ]

    return clip_all


def require_no_norms_of_tables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses to clip gradients of sharded tables by an optimizer that is not distributed.

    Raises:
        UsageError: it would use the norm of this rank's rows.
    """
    if (optimizer.clipnorm or optimizer.global_clipnorm) and any(are_tables(variables)):
        raise UsageError(
            "an optimizer that clips by norm must be distributed to train sharded tables. Received: "
            f"{optimizer.name}, which would use the norm of one rank's rows. Wrap it in hvdtrain.DistributedOptimizer."
        )
