"""What waiting for slow ranks costs, and the option that avoids most of it."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Condition
from hvdtrain.config.fields import facts_of
from hvdtrain.config.wording import option
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.system import devices
from hvdtrain.training.config import QuorumConfig, StepConfig
from hvdtrain.training.quorum_speedup import estimated_speedup

REMEDIES = ("balance", "quorum")

_MIN_GAIN_OF_BALANCING = 1.1
_MIN_GAIN_OF_QUORUM = 1.25
"""Smaller gains are noise. Short steps of equal ranks that share cores have shown 1.14."""
_MIN_GAIN_OF_A_SMALLER_QUORUM = 1.1
_MAX_STEPS = 2000
"""The most steps from which a quorum is estimated, in less than a second."""


def possible_remedies(
    config: StepConfig, reduction: ReductionConfig, conditions: Iterable[Condition] = ()
) -> list[str]:
    """The :data:`REMEDIES` that a run in sync mode with equal parts could have used with its other options.

    Args:
        conditions: the conditions of the job.
    """
    if config.mode != "sync" or config.balancing.is_active or config.stragglers.is_active:
        return []
    facts = facts_of(config, reduction) | exclusions.facts_from(*conditions)
    if devices.is_deterministic():
        facts[exclusions.DETERMINISTIC] = ""
    remedies = {"balance": exclusions.BALANCE, "quorum": exclusions.QUORUM}
    return [name for name, fact in remedies.items() if exclusions.first_broken({**facts, fact: ""}) is None]


def remedy(ready: np.ndarray, possible: Collection[str] = REMEDIES) -> dict[str, Any] | None:
    """The option with which sync mode would process the most samples per second, and its estimated gain.

    Args:
        ready: seconds until a rank has the gradients of a step; shape ``[ranks, steps]``, at least 2 ranks.
        possible: those of :data:`REMEDIES` that other options do not exclude.

    Returns:
        ``option`` and ``speedup``, relative to steps that wait for all ranks; None if there is little to gain.
    """
    if not (np.median(ready, axis=1) > 0).all():
        return None  # too short to be measured
    quorum_gain, quorum = _best_quorum(ready)
    candidates = [
        ("balance", option("balance", True), _gain_of_balancing(ready), _MIN_GAIN_OF_BALANCING),
        ("quorum", option("quorum", quorum), quorum_gain, _MIN_GAIN_OF_QUORUM),
    ]
    worthwhile = [(gain, text) for name, text, gain, least in candidates if name in possible and gain >= least]
    if not worthwhile:
        return None
    speedup, best = max(worthwhile)
    return {"option": best, "speedup": speedup}


def _gain_of_balancing(ready: np.ndarray) -> float:
    """For ranks that are always slower: steps take the harmonic mean of the ranks' times instead of the longest."""
    medians = np.median(ready, axis=1)
    return float(medians.max() * np.mean(1 / medians))


def _best_quorum(ready: np.ndarray) -> tuple[float, int]:
    """For ranks that are held up now and then: the estimated gain, and the quorum.

    Lasting differences are left out of the estimate: a rank that is late in every step contributes nothing.
    """
    num_ranks = len(ready)
    held_up = (ready / np.median(ready, axis=1)[:, None])[:, -_MAX_STEPS:]
    quorums = sorted({num_ranks - 1, max(1, num_ranks * 3 // 4), max(1, num_ranks // 2)})
    gains = {quorum: estimated_speedup(held_up, quorum, QuorumConfig.step_grace) for quorum in quorums}
    # A smaller quorum makes smaller batches, so that it has to be worth it.
    enough = max(gains.values()) / _MIN_GAIN_OF_A_SMALLER_QUORUM
    quorum = max(quorum for quorum, gain in gains.items() if gain >= enough)
    return gains[quorum], quorum
