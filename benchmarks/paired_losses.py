"""Final losses of several seeds, compared with those of sync mode with the same seeds."""

import math
import statistics
from collections.abc import Sequence

T_OF_95_PERCENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantiles of Student's t distribution, by degrees of freedom."""


def difference(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The mean difference from sync mode with the same seeds, and half of its 95 % confidence interval."""
    differences = [ours - other for ours, other in zip(losses, reference, strict=True)]
    interval = T_OF_95_PERCENT[len(losses) - 1] * statistics.stdev(differences) / math.sqrt(len(losses))
    return statistics.mean(differences), interval


def cell(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Mean and two standard deviations of losses, and the difference from sync mode if they are not its own."""
    mean, interval = difference(losses, reference)
    text = f"{statistics.mean(losses):.4f} ({2 * statistics.stdev(losses):.4f})"
    return text if losses == reference else f"{text}, {mean:+.3f} ± {interval:.3f}"
