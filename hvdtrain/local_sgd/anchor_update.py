"""Computes the next anchor, the values from which all replicas start a round, from the sums over ranks."""

import numpy as np
import tensorflow as tf

from hvdtrain.local_sgd.facts import SAMPLES, split_facts
from hvdtrain.local_sgd.outer_optimizer import Flats, OuterOptimizer


class AnchorUpdate:
    """Moves the anchor: trained variables by the outer optimizer's update, all others to their average.

    Args:
        num_trained: the number of flat tensors with trained variables, which come first.
    """

    def __init__(self, outer: OuterOptimizer, num_trained: int):
        self._outer = outer
        self._num_trained = num_trained

    def all(self, totals: Flats, anchor: Flats, velocity: Flats) -> tuple[Flats, Flats, np.ndarray]:
        """The next anchor and velocity computed from the sums over ranks, and the facts."""
        first, facts = split_facts(totals[0])
        pairs = enumerate(zip([first, *totals[1:]], anchor, strict=True))
        moved = [self.one(i, total, facts, start, velocity[i : i + 1]) for i, (total, start) in pairs]
        return [start for start, _ in moved], [each for _, own in moved for each in own], facts

    def one(
        self, i: int, total: tf.Tensor, facts: np.ndarray, start: tf.Tensor, velocity: Flats
    ) -> tuple[tf.Tensor, Flats]:
        """One tensor of the next anchor, and its velocity, a sequence of at most one tensor."""
        if facts[SAMPLES] <= 0:
            return start, velocity
        mean = total / tf.cast(facts[SAMPLES], total.dtype)
        if i >= self._num_trained:
            return start + mean, ()
        (move,), velocity = self._outer.move([mean], velocity)
        return start + move, velocity
