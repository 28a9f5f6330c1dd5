"""Replicas in a loop of a program's own, which are compared over ranks while it runs."""

import functools
import itertools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.agreement import ranks_text
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.distinct_values import most_common
from hvdtrain.distributed.program_operations import OWN
from hvdtrain.distributed.snapshot import path_of, resource_of
from hvdtrain.errors import DivergenceError

_FIRST_STEP, _EVERY = 16, 256
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}

_numbers = itertools.count()


class LoopReplicas:
    """Compares the variables that all ranks update alike. Ranks must first call theirs in the same order."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._name: str | None = None

    def compare_now_and_then(self, num_steps: tf.Tensor, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        """In a step, before its update: compares variables after 16 steps, and after every 256 more.

        Args:
            num_steps: the number of steps before this one, the same on all ranks.
            variables: few, because each makes every step longer: weights, which differ if an optimizer's state does.

        Raises:
            DivergenceError: on every rank: variables differ. A compiled step raises an error of TensorFlow's with its
                text.
        """
        if self._name is None:
            self._name = f"{OWN}loop_replicas_{next(_numbers)}"
        # The fewest operations: they run in every step.
        is_due = (num_steps & (_EVERY - 1)) == _FIRST_STEP
        tf.cond(is_due, lambda: self._compare(num_steps, variables), lambda: True)

    def _compare(self, num_steps: tf.Tensor, variables: Sequence[keras.Variable | tf.Variable]) -> bool:
        assert self._name is not None
        compared = [each for each in variables if resource_of(each).dtype.size in _INTEGERS]
        own = tf.stack([_sum_of_bits(resource_of(each)) for each in compared])
        everyone = self._collectives.gather_rows(own, self._name)
        require = functools.partial(_require_equal, [path_of(each) for each in compared])
        if tf.executing_eagerly():
            require(num_steps, everyone)
        else:
            tf.py_function(require, [num_steps, everyone], [])
        return True


def _sum_of_bits(variable: tf.Variable) -> tf.Tensor:
    integers = _INTEGERS[variable.dtype.size]
    value = tf.convert_to_tensor(variable)
    is_whole = value.dtype.is_integer or value.dtype.is_bool
    bits = tf.cast(value, integers) if is_whole else tf.bitcast(value, integers)
    return tf.reduce_sum(tf.cast(bits, tf.int64))


def _require_equal(paths: Sequence[str], num_steps: tf.Tensor, sums_of_ranks: tf.Tensor) -> None:
    """Requires that all rows of a matrix are equal, in which each rank has one, and each variable a column."""
    sums = sums_of_ranks.numpy()
    different = np.flatnonzero((sums != sums[0]).any(axis=0))
    if not len(different):
        return
    column = sums[:, different[0]].tolist()
    ranks = [rank for rank, value in enumerate(column) if value != most_common(column)]
    raise DivergenceError(
        f"replicas must be equal. After step {int(num_steps)}, variable {paths[different[0]]!r} of "
        f"{ranks_text(ranks, [''] * len(column))} differs from the other ranks'. Change variables and learning "
        "rates by values that are the same on all ranks: those of hvdtrain.reduce or hvdtrain.broadcast_object."
    )
