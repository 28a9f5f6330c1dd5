"""Who contributed to each update, and what follows from it: progress, samples, whom to wait for. Pure bookkeeping."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.wording import option
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.closing import ClosingRule
from hvdtrain.training.config import QuorumConfig
from hvdtrain.training.quorum.shares import EpochShares

Contributors = tuple[int, ...]
"""The ranks whose micro-batches are part of an update, in order."""


class QuorumLedger:
    """The state of a run that all ranks compute from the contributors of its updates.

    Args:
        plan: of any rank.
    """

    def __init__(self, plan: SamplePlan, config: QuorumConfig):
        self._plan = plan
        self._config = config
        self._replayed: Sequence[Contributors] | None = None
        self.shares = EpochShares(plan)
        self.updates = 0
        """Number of updates."""
        self.samples = 0
        """Number of samples of all updates."""
        self._smallest: int | None = None
        self._largest = 0
        self.missed = [0] * plan.size
        """How many updates each rank has missed, although it had samples."""
        self.missed_in_a_row = [0] * plan.size

    def replay(self, contributors: Sequence[Contributors]) -> None:
        """From now on, these ranks contribute to the updates, counted from the first of the run."""
        self._replayed = contributors

    @property
    def step(self) -> int:
        """Step number: the end of the epoch minus the full batches that remain in it.

        An update advances it by at most 1.
        """
        plan = self._plan
        left = plan.samples_per_epoch - self.shares.samples
        return (self.shares.epoch + 1) * plan.steps_per_epoch - -(-left // plan.global_batch_size)

    def rule(self) -> ClosingRule:
        """When the next update closes.

        Raises:
            UsageError: the contributors to replay are those of another run.
        """
        left = self.shares.num_left()
        active = [rank for rank, num in enumerate(left) if num]
        if self._replayed is not None:
            return ClosingRule.exactly(self._replayed_contributors(active))
        assert self._config.quorum is not None
        if max(left) == 1:
            return ClosingRule.exactly(active)
        return ClosingRule(
            active=active,
            quorum=min(self._config.quorum, len(active)),
            required=[rank for rank in active if self.missed_in_a_row[rank] >= self._config.max_missed_updates],
            grace=self._config.step_grace,
            deadline_s=self._config.step_deadline,
        )

    def _replayed_contributors(self, active: Sequence[int]) -> Contributors:
        assert self._replayed is not None
        found = self._replayed[self.updates] if self.updates < len(self._replayed) else ()
        if not found or not set(found) <= set(active):
            raise UsageError(
                f"{option('replay')} must be the record of a run with the same data and batches, at least as long. "
                f"Received: ranks {list(found)} for update {self.updates + 1}, of {len(self._replayed)} in the file; "
                f"samples are left to ranks {list(active)}."
            )
        return found

    def record(self, contributors: Contributors) -> None:
        """Counts an update."""
        active = [rank for rank, num in enumerate(self.shares.num_left()) if num]
        before = self.shares.samples
        self.shares.contribute(contributors)
        batch = self.shares.samples - before
        self.updates += 1
        self.samples += batch
        self._smallest = batch if self._smallest is None else min(self._smallest, batch)
        self._largest = max(self._largest, batch)
        for rank in active:
            has_missed = rank not in contributors
            self.missed[rank] += has_missed
            self.missed_in_a_row[rank] = self.missed_in_a_row[rank] + 1 if has_missed else 0
        if self.shares.is_complete:
            self.shares = EpochShares(self._plan, self.shares.epoch + 1)

    def batch_weight(self, contributors: Contributors) -> float:
        """The samples of the next update, relative to those of a full micro-batch; call it before :meth:`record`."""
        batches = [self.shares.next_of(rank) for rank in contributors]
        return sum(each.count for each in batches if each is not None) / self._plan.batch_size

    def effective_batch(self) -> dict[str, float]:
        """Samples of an update: mean, min and max."""
        return {"mean": self.samples / max(1, self.updates), "min": self._smallest or 0, "max": self._largest}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "shares": self.shares.state(),
            "updates": self.updates,
            "samples": self.samples,
            "smallest": self._smallest,
            "largest": self._largest,
            "missed": list(self.missed),
            "missed_in_a_row": list(self.missed_in_a_row),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned; with a different number of ranks, counts of missed updates start at
        0."""
        self.shares = EpochShares.restored(self._plan, state["shares"])
        self.updates, self.samples = state["updates"], state["samples"]
        self._smallest, self._largest = state["smallest"], state["largest"]
        if len(state["missed"]) == self._plan.size:
            self.missed, self.missed_in_a_row = list(state["missed"]), list(state["missed_in_a_row"])
