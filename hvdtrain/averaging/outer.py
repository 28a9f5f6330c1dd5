"""What becomes of an averaged displacement: it is gone as it is, or taken for the gradient of an outer optimizer."""

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from hvdtrain.averaging.options import LocalTraining

Flats = Sequence[tf.Tensor]


class Outer(Protocol):
    """From how far the replicas have moved on average to how far all of them move."""

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        """Takes flat tensors and gives them back, the same on every rank, with the velocity from then on.

        Args:
            velocity: what this gave the time before; nothing the first time.
        """


class Average:
    """All go where the replicas are on average."""

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        return displacements, ()


class Nesterov:
    """SGD with Nesterov's momentum, the displacement its negative gradient (Douillard et al., arXiv:2311.08105)."""

    def __init__(self, rate: float, momentum: float):
        self._rate = rate
        self._momentum = momentum

    def move(self, displacements: Flats, velocity: Flats) -> tuple[Flats, Flats]:
        velocity = velocity or [tf.zeros_like(each) for each in displacements]
        velocity = [self._momentum * v + d for v, d in zip(velocity, displacements, strict=True)]
        moves = [self._rate * (d + self._momentum * v) for d, v in zip(displacements, velocity, strict=True)]
        return moves, velocity


def make_outer(options: LocalTraining) -> Outer:
    """The one that is asked for."""
    return Average() if options.outer == "average" else Nesterov(options.outer_rate, options.outer_momentum)
