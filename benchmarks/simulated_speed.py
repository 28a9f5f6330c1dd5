"""How much of the ranks' speed each way of training keeps while nothing fails: each rank is a clock.

Used by ``simulated_goodput.py``. Steps are drawn at random, rings are those of ``simulated_averaging.py``. Slow ranks
take twice as long for a sample. In elastic jobs, ranks that are left share the global batch of all.
"""

import dataclasses
import functools
import math

import numpy as np
from simulated_averaging import BUCKETS, SIZE, over_all_s

from hvdtrain.commands.bench import scaling_model
from hvdtrain.commands.bench.scaling_model import Link

SLOWER = 2
MAX_MISSED_UPDATES, GRACE = 16, 1.25
"""The defaults of ``--quorum``."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Ranks and links of a job without failures."""

    ranks: int
    """All, with which the global batch is divided at the start."""
    between_hosts: Link
    hierarchical: bool = False
    """Averages within and between hosts, as over MPI and NCCL; over Gloo, in one ring."""
    slow: int = 0
    step_s: float = 0.2
    varies: bool = True
    """Steps vary by 3 %, and one in a hundred takes 1.5 times as long."""
    num_bytes: int = SIZE
    """Of the parameters."""

    def drawn_s(self, rng: np.random.Generator, steps: int, living: int) -> np.ndarray:
        """Times of steps on the living ranks, the slow ones first, shape ``[steps, ranks]``."""
        shape = (steps, living)
        drawn = np.full(shape, self.step_s * self.ranks / living)
        if self.varies:
            drawn *= rng.normal(1, 0.03, shape) * np.where(rng.random(shape) < 0.01, 1.5, 1.0)
        drawn[:, : self.slow] *= SLOWER
        return drawn

    def average_s(self, num_bytes: float, living: int) -> float:
        if living == 1 or not num_bytes:
            return 0.0
        return over_all_s(num_bytes, living, self.hierarchical, self.between_hosts)

    def share_state_s(self, living: int) -> float:
        """The time in which newcomers receive the parameters and two slots of each, by a binomial tree."""
        if not self.num_bytes:
            return 0.0
        link = self.between_hosts
        return math.ceil(math.log2(living)) * (link.latency_s + 8 * 3 * self.num_bytes / link.bits_per_second)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train; ``every`` 0: gradients are averaged at each step."""

    every: int = 0
    quorum_share: float = 1.0
    overlap: bool = False
    wait_free: bool = False
    fragments: int = 1

    @property
    def unit_steps(self) -> int:
        """Steps between two averages, of all parameters or of a fragment."""
        return max(1, self.every // self.fragments)


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a job does while nothing fails."""

    share: float
    """Samples that enter the model, of those that the living ranks could compute alone."""
    round_s: float
    """Between two contributions of a rank to an average of the same parameters; in sync mode, a step."""
    average_s: float = 0.0
    """From a rank's contribution to the end of its average, if it is made in the background."""


def alone_per_s(setting: Setting, living: int, slow: int) -> float:
    """Steps of the size at the start that ranks could make in a second, each alone."""
    mean_s = setting.step_s * (1.005 if setting.varies else 1.0)
    return (living - slow + slow / SLOWER) / mean_s


@functools.cache
def speed(setting: Setting, way: Way, living: int, rounds: int = 40) -> Speed:
    """Simulates rounds of the living ranks; all of the slow ones live."""
    rng = np.random.default_rng([living, setting.ranks, rounds])
    per_step = setting.ranks / living
    possible = alone_per_s(setting, living, setting.slow)

    def found(samples: float, seconds: float, round_s: float, average_s: float = 0.0) -> Speed:
        return Speed(float(samples / seconds / possible), round_s, average_s)

    if not way.every:
        steps = rounds * 16
        if way.quorum_share < 1:
            samples, seconds = _with_quorum(setting, way, living, steps, rng)
        else:
            slowest_s = setting.drawn_s(rng, steps, living).max(axis=1)
            samples, seconds = steps * living, sum(_step_s(setting, each, living) for each in slowest_s)
        return found(samples * per_step, float(seconds), float(seconds / steps))
    drawn_s = setting.drawn_s(rng, rounds * way.every, living)
    units_s = drawn_s.reshape(-1, way.unit_steps, living).sum(axis=1)
    average_s = setting.average_s(setting.num_bytes / way.fragments, living)
    samples = drawn_s.size * per_step
    if way.wait_free:
        round_s = max(float(units_s.max(axis=1).mean()), average_s)
        return Speed(1.0, round_s, average_s)
    if not way.overlap:
        seconds = float(units_s.max(axis=1).sum()) + len(units_s) * average_s
        return found(samples, seconds, way.fragments * seconds / len(units_s))
    clocks_s, complete_s = np.zeros(living), 0.0
    for unit_s in units_s:
        clocks_s = np.maximum(clocks_s + unit_s, complete_s)
        complete_s = float(clocks_s.max()) + average_s
    seconds = float(clocks_s.max())
    return found(samples, seconds, way.fragments * seconds / len(units_s), average_s)


def _step_s(setting: Setting, computed_s: float, living: int) -> float:
    if not setting.num_bytes:
        return computed_s
    end_s = scaling_model.communication_end_s(BUCKETS, computed_s, lambda size: setting.average_s(size, living))
    return max(computed_s, end_s)


def _with_quorum(
    setting: Setting, way: Way, living: int, updates: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Samples, in steps of a rank, and seconds; a late rank drops what it has computed and starts again."""
    quorum = max(1, math.floor(way.quorum_share * living))
    now_s, contributions = 0.0, 0
    free_s, missed = np.zeros(living), np.zeros(living, int)
    for drawn_s in setting.drawn_s(rng, updates, living):
        # A rank that computes for a past update begins when it is done.
        begins_s = np.maximum(free_s, now_s)
        ready_s = begins_s + drawn_s
        end_s = now_s + GRACE * (np.partition(ready_s, quorum - 1)[quorum - 1] - now_s)
        end_s = max(end_s, float(ready_s[missed >= MAX_MISSED_UPDATES].max(initial=0.0)))
        end_s = min(end_s, float(ready_s.max()))
        is_in = ready_s <= end_s
        contributions += int(is_in.sum())
        missed = np.where(is_in, 0, missed + 1)
        free_s = np.where(begins_s < end_s, ready_s, free_s)
        now_s += _step_s(setting, end_s - now_s, living)
        free_s = np.where(is_in, now_s, free_s)
    return contributions, now_s


def interval(setting: Setting, way: Way) -> int:
    """H of a way: 16, or the smallest power of two with which averages are hidden, or else take half of the time."""
    every, average_s = 16, setting.average_s(setting.num_bytes / way.fragments, setting.ranks)
    while average_s > every / way.fragments * setting.step_s * (1.0 if way.overlap or way.wait_free else 0.5):
        every *= 2
    return every
