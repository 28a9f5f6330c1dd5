"""The samples of a run with backup workers, from who contributed to its updates."""

from collections.abc import Sequence

import numpy as np

from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.training.config import QuorumConfig
from hvdtrain.training.quorum.ledger import QuorumLedger


def samples_of_updates(contributions: Sequence[Sequence[int]], plan: SamplePlan) -> list[np.ndarray]:
    """The sample numbers of each update of a run, counted from its first one."""
    ledger = QuorumLedger(plan, QuorumConfig(quorum=1))
    batches = []
    for ranks in contributions:
        shares = ledger.shares
        next_ones = [shares.next_of(rank) for rank in ranks]
        positions = [shares.positions_of(rank, each.index) for rank, each in zip(ranks, next_ones, strict=True)]
        batches.append(plan.order(shares.epoch)[np.concatenate(positions)])
        ledger.record(tuple(ranks))
    return batches
