"""Logs the step times of all ranks to ``ranks.jsonl``, for ``hvdtrain report``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.loggers.event_file import EventFile
from hvdtrain.loggers.reporter import Reporter, RunShape

_STEPS_PER_LINE = 64
_MAX_RANKS = 64
"""The most ranks that are logged one by one."""
_NUM_SLOWEST = 10
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_PARTS = ("input_ms", "ready_ms", "reduction_ms")


class RankTimesReporter(Reporter):
    """Appends a JSON object for every 64 steps: the medians of each rank's times in them, in milliseconds.

    ``input_ms``: waiting for input. ``ready_ms``: from the start of a step until the rank's gradients are computed.
    ``reduction_ms``: from then until all gradients are reduced, which includes waiting for slower ranks.

    With more than 64 ranks, each of the three is a list of quantiles over ranks, and ``slowest`` lists the ten ranks
    with the largest ``ready_ms``, each with its time. The file of a run of a million steps has at most 50 MB.
    """

    def __init__(self, path: Path):
        self._file = EventFile(path)

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._file.remove_after(shape.resumed_step)

    def rank_times(self, last_step: int, seconds: np.ndarray, batch_sizes: Sequence[int]) -> None:
        num_ranks, num_steps, _ = seconds.shape
        shares = {} if len(set(batch_sizes)) == 1 or num_ranks > _MAX_RANKS else {"batch_sizes": list(batch_sizes)}
        for begin in range(0, num_steps, _STEPS_PER_LINE):
            part = seconds[:, begin : begin + _STEPS_PER_LINE]
            first_step = last_step - num_steps + begin + 1
            place = {"first_step": first_step, "step": first_step + part.shape[1] - 1, "ranks": num_ranks}
            reduced = part[:, ~np.isnan(part).any(axis=(0, 2))]
            if reduced.size:
                medians = 1000 * np.median(reduced, axis=1)
                self._file.append("times", {**place, **_times(medians), **shares})


def _times(medians: np.ndarray) -> dict[str, Any]:
    """The times in milliseconds of ranks, ``[ranks, 3]``, or what describes them."""
    if len(medians) <= _MAX_RANKS:
        return {name: _rounded(medians[:, i]) for i, name in enumerate(_PARTS)}
    ready = medians[:, _PARTS.index("ready_ms")]
    slowest = np.argsort(ready)[: -_NUM_SLOWEST - 1 : -1]
    return {
        **{name: _rounded(np.quantile(medians[:, i], _QUANTILES)) for i, name in enumerate(_PARTS)},
        "slowest": [[int(rank), _rounded(ready[[rank]])[0]] for rank in slowest],
    }


def _rounded(values: np.ndarray) -> list[float]:
    """With four significant digits, which keep lines short."""
    return [float(f"{value:.4g}") for value in values]
