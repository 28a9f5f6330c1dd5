"""Load balancing: faster ranks get more samples of the same global batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.wording import option
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import split_batch
from hvdtrain.errors import UsageError
from hvdtrain.system.terminal import report
from hvdtrain.training.config import BalanceConfig
from hvdtrain.training.step_times import EXCHANGE_EVERY, TimeShares

_MIN_GAIN = 0.05
"""How much shorter the steps of the slowest rank must become: less than this is noise, also between equal ranks."""
_HALVINGS = 60
_STEADY = 0.1


class Measured(NamedTuple):
    """An assignment, and how long ranks took with it."""

    sizes: tuple[int, ...]
    """Samples of each rank in a micro-batch; at least 1."""
    seconds: tuple[float, ...]


def rebalanced(now: Measured, most: int, earlier: Measured | None = None) -> tuple[int, ...]:
    """The batch sizes with which ranks would take equally long, or the current ones if that gains less than 5 %.

    Args:
        now: the current assignment.
        most: the most samples that a rank may have.
        earlier: the one before: from both, the part of a rank's time that does not depend on its samples is known.
    """
    fixed_s, per_sample_s = _fitted(now, earlier)
    num_samples = sum(now.sizes)

    def fitting(seconds: float) -> np.ndarray:
        """How many samples each rank computes in this time."""
        return np.clip((seconds - fixed_s) / per_sample_s, 1, most)

    shortest, longest = 0.0, float(np.max(fixed_s + per_sample_s * num_samples))
    for _ in range(_HALVINGS):
        middle = (shortest + longest) / 2
        shortest, longest = (middle, longest) if fitting(middle).sum() < num_samples else (shortest, middle)
    proposed = split_batch(num_samples, fitting(longest).tolist(), most)
    expected_s = float(np.max(fixed_s + per_sample_s * np.asarray(proposed)))
    return proposed if expected_s <= (1 - _MIN_GAIN) * max(now.seconds) else now.sizes


def _is_steady(seconds: np.ndarray) -> bool:
    """Whether no rank's speed has changed within these steps, so that they can be compared with later ones."""
    halves = [np.median(each, axis=1) for each in np.array_split(seconds, 2, axis=1) if each.size]
    return bool(np.allclose(halves[0], halves[-1], rtol=_STEADY))


def _fitted(now: Measured, earlier: Measured | None) -> tuple[np.ndarray, np.ndarray]:
    """For each rank, the seconds of a micro-batch that do not depend on its samples, and those of a sample.

    One measurement does not tell them apart: all are attributed to samples then, and also if the two contradict each
    other, as when a rank has become slower meanwhile.
    """
    sizes, seconds = np.asarray(now.sizes, np.float64), np.asarray(now.seconds, np.float64)
    whole = seconds / sizes
    if earlier is None or len(earlier.sizes) != len(now.sizes):
        return np.zeros_like(seconds), whole
    change = sizes - np.asarray(earlier.sizes)
    slope = np.divide(seconds - np.asarray(earlier.seconds), change, out=np.zeros_like(seconds), where=change != 0)
    per_sample = np.where((slope > 0) & (slope < whole), slope, whole)
    return seconds - per_sample * sizes, per_sample


class LoadBalancer:
    """Assigns the samples of each global batch to ranks, from how long they took for the previous steps.

    The global batch stays the same, and each rank's loss is weighted by its number of samples: the updates are those
    of one process, whatever the assignment.

    Args:
        feed: this rank's micro-batches, whose plan is changed.
        ranks_may_change: whether other ranks may train together later; a newcomer is alone until it joins them.
    """

    def __init__(self, config: BalanceConfig, feed: TrainingFeed, times: TimeShares, *, ranks_may_change: bool = False):
        self._config = config
        self._feed = feed
        self.times = times
        """What decisions are based on."""
        self._ranks_may_change = ranks_may_change
        self._num_changes = 0
        self._earlier: Measured | None = None
        plan = feed.plan
        self._has_shares = config.rank_shares is not None and not (ranks_may_change and plan.size == 1)
        if config.rank_shares is not None and self._has_shares:
            if len(config.rank_shares) != plan.size:
                raise UsageError(
                    f"{option('shares')} must have a number for each rank. Received: {config.shares} for {plan.size} "
                    "rank(s)"
                )
            feed.set_rank_batch_sizes(split_batch(plan.micro_batch_size, config.rank_shares, plan.micro_batch_size))

    @property
    def rank_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank in a full micro-batch."""
        plan = self._feed.plan
        return plan.rank_batch_sizes or (plan.batch_size,) * plan.size

    @property
    def exchange_every(self) -> int:
        """Steps between two exchanges of step times, each followed by :meth:`rebalance`."""
        return self._config.balance_every if self._config.balance else EXCHANGE_EVERY

    def rebalance(self) -> None:
        """Changes the assignment if the latest exchange of step times shows that this makes steps shorter.

        All ranks must call it.
        """
        if not self._config.balance:
            return
        # Until all gradients are computed: what the other ranks wait for.
        seconds = self.times.all_steps[-1][:, :, 1]
        seconds = seconds[:, ~np.isnan(seconds).any(axis=0)]
        if not seconds.size:
            return
        now = Measured(self.rank_batch_sizes, tuple(np.median(seconds, axis=1).tolist()))
        sizes = rebalanced(now, self._max_batch_size, self._earlier)
        if sizes != now.sizes:
            self._earlier = now if _is_steady(seconds) else None
            self._num_changes += 1
            self._feed.set_rank_batch_sizes(sizes)
            self._feed.start(self.times.micro_batches)

    @property
    def _max_batch_size(self) -> int:
        plan = self._feed.plan
        equal_share = -(-plan.micro_batch_size // plan.size)
        limit = self._config.max_batch_size or 2 * equal_share
        # Too few ranks for the limit may remain.
        return max(limit, equal_share) if self._ranks_may_change else limit

    def restart(self, rank: int) -> None:
        """Resets to equal shares after a membership change."""
        if self._has_shares and rank == 0:
            report(0, f"{option('shares')} was for the ranks before; from now on, samples are divided equally")
        self._has_shares = False
        self._earlier = None

    def gauges(self) -> dict[str, float]:
        """The assignment's part of a log line."""
        sizes = self.rank_batch_sizes
        return {"smallest_batch": min(sizes), "largest_batch": max(sizes)} if self._config.is_active else {}

    def summary(self) -> dict[str, Any]:
        """Its part of a run's ``summary.json``."""
        if not self._config.is_active:
            return {}
        return {"rank_batch_sizes": list(self.rank_batch_sizes), "batch_size_changes": self._num_changes}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"rank_batch_sizes": list(self.rank_batch_sizes), "changes": self._num_changes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned; with a different number of ranks, shares start out equal."""
        sizes = tuple(state["rank_batch_sizes"])
        if self._config.balance and len(sizes) == self._feed.plan.size:
            self._feed.set_rank_batch_sizes(sizes)
            self._num_changes = state["changes"]
