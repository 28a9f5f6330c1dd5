"""The averages of a model's fragments by all ranks, in NumPy: what hvdtrain.ParameterAverager should do.

Each rank's "training" is a function of its rank and its step, so that a process can simulate all ranks.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Arrays = list[np.ndarray]


@dataclasses.dataclass
class Algorithm:
    """What is averaged, and how.

    Args:
        division: for each fragment, the places of its variables.
        trained: the places of the variables that an outer optimizer updates.
        delay: steps between sending and merging.
        nesterov: learning rate and momentum of the outer optimizer; None: take the average.
    """

    division: Sequence[Sequence[int]]
    trained: set[int]
    every: int
    delay: int = 0
    alpha: float = 1.0
    nesterov: tuple[float, float] | None = None


class _Rank:
    def __init__(self, start: Arrays, algorithm: Algorithm, move: Callable[[int], tuple[Arrays, int]], num_steps: int):
        self.values = [each.astype(np.float64) for each in start]
        self.start = [each.copy() for each in self.values]
        self.samples = [0] * len(algorithm.division)
        self.pending: dict[int, tuple[int, Arrays]] = {}
        self.anchors: dict[int, Arrays] = {}
        self.step = 0
        self.num_steps = num_steps
        self.history: list[Arrays] = []
        self._algorithm = algorithm
        self._move = move

    def train_to(self, step: int) -> None:
        while self.step < min(step, self.num_steps):
            moves, samples = self._move(self.step)
            for value, change in zip(self.values, moves, strict=True):
                value += change
            self.samples = [each + samples for each in self.samples]
            self.step += 1
            for fragment in list(self.pending):
                if self.step - self.pending[fragment][0] == self._algorithm.delay:
                    self.merge(fragment, self._algorithm.alpha)
            # As they are after this step; overwritten if a fragment is averaged in it.
            self.history.append([each.copy() for each in self.values])

    def send(self, fragment: int) -> Arrays:
        """Displacements multiplied by samples."""
        places = self._algorithm.division[fragment]
        self.pending[fragment] = self.step, [self.values[place].copy() for place in places]
        return [self.samples[fragment] * (self.values[place] - self.start[place]) for place in places]

    def merge(self, fragment: int, alpha: float) -> None:
        _, sent = self.pending.pop(fragment)
        for i, place in enumerate(self._algorithm.division[fragment]):
            since = self.values[place] - sent[i]
            self.start[place] = alpha * self.anchors[fragment][i] + (1 - alpha) * sent[i]
            self.values[place] = self.start[place] + since


def simulate(
    start: Arrays, algorithm: Algorithm, move: Callable[[int, int], tuple[Arrays, int]], steps: Sequence[int]
) -> tuple[Arrays, list[list[Arrays]]]:
    """The final values, and those of each rank after each of its steps.

    Args:
        move: from rank and step to the changes that the step makes to this rank's values, and its samples.
        steps: those of each rank.
    """
    count = len(algorithm.division)
    ranks = [_Rank(start, algorithm, lambda step, rank=rank: move(rank, step), num) for rank, num in enumerate(steps)]
    anchors = [[start[place].astype(np.float64) for place in places] for places in algorithm.division]
    velocities = [[np.zeros_like(each) for each in anchor] for anchor in anchors]
    round_number, in_a_row = 0, 0
    while in_a_row < count:
        cycle, fragment = divmod(round_number, count)
        end = cycle * algorithm.every + (fragment + 1) * algorithm.every // count
        totals, samples = None, 0
        for rank in ranks:
            rank.train_to(end)
            if end > rank.num_steps:
                for each in list(rank.pending):
                    rank.merge(each, algorithm.alpha)
            samples += rank.samples[fragment]
            sent = rank.send(fragment)
            rank.samples[fragment] = 0
            totals = sent if totals is None else [total + each for total, each in zip(totals, sent, strict=True)]
        if samples:
            for i, place in enumerate(algorithm.division[fragment]):
                displacement = totals[i] / samples
                if algorithm.nesterov is not None and place in algorithm.trained:
                    rate, momentum = algorithm.nesterov
                    velocities[fragment][i] = momentum * velocities[fragment][i] + displacement
                    displacement = rate * (displacement + momentum * velocities[fragment][i])
                anchors[fragment][i] = anchors[fragment][i] + displacement
        all_finished = all(end > rank.num_steps for rank in ranks)
        in_a_row = in_a_row + 1 if all_finished else 0
        for rank in ranks:
            rank.anchors[fragment] = anchors[fragment]
            if all_finished:
                rank.merge(fragment, 1.0)
            elif algorithm.delay == 0 or end > rank.num_steps:
                rank.merge(fragment, algorithm.alpha)
                if end <= rank.num_steps:
                    rank.history[-1] = [each.copy() for each in rank.values]
        round_number += 1
    return ranks[0].values, [rank.history for rank in ranks]
