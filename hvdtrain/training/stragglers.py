"""What waiting for slow ranks costs, and the option that avoids most of it."""

from typing import Any

import numpy as np

from hvdtrain.training.config import QuorumConfig

_MIN_GAIN_OF_BALANCING = 1.1
_MIN_GAIN_OF_QUORUM = 1.25
"""Smaller gains are noise. Short steps of equal ranks that share cores have shown 1.14."""


def remedy(ready: np.ndarray) -> dict[str, Any] | None:
    """The option with which sync mode would make most samples per second, and its estimated gain.

    Args:
        ready: seconds until a rank has the gradients of a step; shape ``[ranks, steps]``, at least 2 ranks.

    Returns:
        ``option`` and ``speedup``, relative to steps that wait for all ranks; None if there is little to gain.
    """
    candidates = [
        ("--balance", _gain_of_balancing(ready), _MIN_GAIN_OF_BALANCING),
        (f"--quorum {len(ready) - 1}", _gain_of_quorum(ready), _MIN_GAIN_OF_QUORUM),
    ]
    worthwhile = [(gain, option) for option, gain, least in candidates if gain >= least]
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
