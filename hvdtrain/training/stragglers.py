"""What waiting for slow ranks costs, and the option that avoids most of it."""

from collections.abc import Collection
from typing import Any

import numpy as np

from hvdtrain.config.fields import with_options
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.errors import UsageError
from hvdtrain.system import devices
from hvdtrain.training.config import QuorumConfig, StepConfig

REMEDIES = ("balance", "quorum")

_MIN_GAIN_OF_BALANCING = 1.1
_MIN_GAIN_OF_QUORUM = 1.25
"""Smaller gains are noise. Short steps of equal ranks that share cores have shown 1.14."""


def possible_remedies(config: StepConfig, reduction: ReductionConfig, *, ranks_may_change: bool) -> list[str]:
    """Those of :data:`REMEDIES` that a run in sync mode with equal parts could have used with its other options.

    Args:
        ranks_may_change: whether the job is elastic.
    """
    if config.mode != "sync" or config.balancing.is_active or config.stragglers.is_active:
        return []
    possible = []
    if not devices.is_deterministic() and reduction.op != "adasum" and _is_allowed(config, {"balance": True}):
        possible.append("balance")
    is_plain = (reduction.op, reduction.compression, reduction.shard_optimizer) == ("average", "none", False)
    if is_plain and not ranks_may_change and _is_allowed(config, {"quorum": 1}):
        possible.append("quorum")
    return possible


def _is_allowed(config: StepConfig, values: dict[str, Any]) -> bool:
    try:
        with_options(config, values)
    except UsageError:
        return False
    return True


def remedy(ready: np.ndarray, possible: Collection[str] = REMEDIES) -> dict[str, Any] | None:
    """The option with which sync mode would make most samples per second, and its estimated gain.

    Args:
        ready: seconds until a rank has the gradients of a step; shape ``[ranks, steps]``, at least 2 ranks.
        possible: those of :data:`REMEDIES` that other options do not exclude.

    Returns:
        ``option`` and ``speedup``, relative to steps that wait for all ranks; None if there is little to gain.
    """
    candidates = [
        ("balance", "--balance", _gain_of_balancing(ready), _MIN_GAIN_OF_BALANCING),
        ("quorum", f"--quorum {len(ready) - 1}", _gain_of_quorum(ready), _MIN_GAIN_OF_QUORUM),
    ]
    worthwhile = [(gain, option) for name, option, gain, least in candidates if name in possible and gain >= least]
    if not worthwhile:
        return None
    speedup, option = max(worthwhile)
    return {"option": option, "speedup": speedup}


def _gain_of_balancing(ready: np.ndarray) -> float:
    """For ranks that are always slower: steps take the harmonic mean of the ranks' times instead of the longest."""
    medians = np.median(ready, axis=1)
    return float(medians.max() * np.mean(1 / medians))


def _gain_of_quorum(ready: np.ndarray) -> float:
    """For ranks that are held up now and then: a step closes without the last rank if it is late.

    Lasting differences are left out of the estimate: a rank that is late in every step contributes nothing.
    """
    held_up = np.sort(ready / np.median(ready, axis=1)[:, None], axis=0)
    closes = np.minimum(held_up[-1], held_up[-2] * (1 + QuorumConfig.step_grace))
    share_of_samples = 1 - np.mean(held_up[-1] > closes) / len(ready)
    return float(np.mean(held_up[-1]) / np.mean(closes) * share_of_samples)
