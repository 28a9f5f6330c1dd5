"""Sums over ranks of small tensors in a compiled step, by call site."""

from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import StepSum


class StepSums:
    """Adds up what each rank computes of the part that it has. Ranks must first call theirs in the same order."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._sums: dict[str, StepSum] = {}

    def __call__(self, tensors: Sequence[tf.Tensor], place: str) -> list[tf.Tensor]:
        """The sums; ``place`` identifies the call site."""
        if place not in self._sums:
            self._sums[place] = self._collectives.step_sum()
        return self._sums[place](tensors)
