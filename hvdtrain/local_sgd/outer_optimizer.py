"""Outer optimizers: turn the average displacement of a round into the update of all replicas."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from hvdtrain.local_sgd.config import LocalSGDConfig

Flats = Sequence[tf.Tensor]


class OuterOptimizer(Protocol):
    """Maps the replicas' average displacement to the update that all of them make."""

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        """Returns the updates and the new velocity, both flat tensors that are equal on all ranks.

        Args:
            velocity: the velocity returned by the previous call; empty in the first.
        """


class PlainAverage:
    """Moves all replicas to their average."""

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        return displacements, ()


class NesterovOuter:
    """SGD with Nesterov momentum; the displacement is its negative gradient (Douillard et al., arXiv:2311.08105)."""

    def __init__(self, learning_rate: float, momentum: float):
        self._learning_rate = learning_rate
        self._momentum = momentum

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        velocity = velocity or [tf.zeros_like(each) for each in displacements]
        velocity = [self._momentum * v + d for v, d in zip(velocity, displacements, strict=True)]
        moves = [self._learning_rate * (d + self._momentum * v) for d, v in zip(displacements, velocity, strict=True)]
        return moves, velocity


def make_outer_optimizer(config: LocalSGDConfig) -> OuterOptimizer:
    """The outer optimizer that the configuration selects."""
    return (
        PlainAverage()
        if config.outer == "average"
        else NesterovOuter(config.outer_learning_rate, config.outer_momentum)
    )
