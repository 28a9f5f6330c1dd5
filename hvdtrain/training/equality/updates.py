"""The updates that optimizers make in a step: their gradients are compared, and are what a check compares first."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.gradient_reduction import Gradient, is_sparse, values_of, with_unique_rows
from hvdtrain.training.equality.norms import norm


@dataclasses.dataclass(frozen=True)
class Update:
    """What one call of an optimizer applies, after the reduction and clipping."""

    variables: Sequence[keras.Variable]
    gradients: Sequence[Gradient]

    def norm(self) -> float:
        """The norm of all gradients together."""
        return float(np.sqrt(sum(norm_of(each) ** 2 for each in self.gradients)))


ChooseGradients = Callable[[keras.optimizers.Optimizer, Update], Sequence[Gradient]]
"""Receives what an optimizer is about to apply; returns what it applies."""


def norm_of(gradient: Gradient) -> float:
    """The Euclidean norm."""
    values = with_unique_rows(gradient)
    return norm(np.asarray(values.values if is_sparse(gradient) else values))


def norm_of_entries(gradient: Gradient) -> float:
    """The norm that an optimizer sees which squares each entry of a sparse gradient: repeated rows are not added up."""
    return norm(np.asarray(values_of(gradient)))


def distance(first: Gradient, second: Gradient) -> float:
    """The norm of the difference of two gradients of one variable."""
    if not is_sparse(first) and not is_sparse(second):
        return norm(np.asarray(first), minus=np.asarray(second))
    both = [with_unique_rows(_as_sparse(each)) for each in (first, second)]
    rows = tf.concat([both[0].indices, tf.cast(both[1].indices, both[0].indices.dtype)], 0)
    values = tf.concat([tf.cast(both[0].values, tf.float64), -tf.cast(both[1].values, tf.float64)], 0)
    return norm(np.asarray(with_unique_rows(tf.IndexedSlices(values, rows)).values))


def _as_sparse(gradient: Gradient) -> tf.IndexedSlices:
    return gradient if is_sparse(gradient) else tf.IndexedSlices(gradient, tf.range(tf.shape(gradient)[0]))
