"""Where the time of steps went, by rank: from the lines of ``ranks.jsonl``."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.runs.run_record import is_finite

_STRAGGLER_RATIO = 1.1
"""Ranks that are less slow differ by chance."""
_TIMES = ("input_ms", "ready_ms", "reduction_ms")


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of the steps from ``first_step`` to ``step``, in milliseconds: medians over ranks."""

    first_step: int
    step: int
    input: float
    compute: float
    waiting: float
    """For the slowest rank, until it has computed its gradients."""
    communication: float
    """That is not hidden behind computing."""


@dataclasses.dataclass(frozen=True)
class RankTime:
    """How long a rank took until it had computed its gradients, in milliseconds, in some steps."""

    first_step: int
    step: int
    rank: int
    ready_ms: float
    ratio: float
    """To the median over ranks."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait."""

    rank: int
    share: float
    """Of the lines in which it is the slowest."""
    ratio: float
    """Of its time to the median over ranks, there."""
    first_step: int
    """Since when it is slow."""


def usable(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that are complete: a file may be damaged, or of another version."""
    return [line for line in lines if _is_usable(line)]


def parts(line: Mapping[str, Any]) -> StepParts:
    """The parts of the steps of a line."""
    ready, slowest = _median(line, "ready_ms"), max(line["ready_ms"])
    waited = _median(line, "input_ms")
    return StepParts(
        line["first_step"],
        line["step"],
        input=waited,
        compute=max(0.0, ready - waited),
        waiting=slowest - ready,
        # The slowest rank waits for nobody.
        communication=min(line["reduction_ms"]) if line["ranks"] > 1 else 0.0,
    )


def ranks(line: Mapping[str, Any]) -> list[RankTime]:
    """The ranks of a line; of more than 64, the ten slowest."""
    median = _median(line, "ready_ms") or 1.0
    pairs = line["slowest"] if "slowest" in line else enumerate(line["ready_ms"])
    return [RankTime(line["first_step"], line["step"], int(rank), ms, ms / median) for rank, ms in pairs]


def with_gaps(parts: Sequence[StepParts]) -> list[StepParts]:
    """The same, with nothing where steps are missing, so that no line is drawn across them."""
    found: list[StepParts] = []
    for each in parts:
        if found and each.first_step > found[-1].step + 1:
            for step in (found[-1].step, each.first_step):
                found.append(StepParts(step, step, input=0.0, compute=0.0, waiting=0.0, communication=0.0))
        found.append(each)
    return found


def straggler(lines: Sequence[Mapping[str, Any]]) -> Straggler | None:
    """The rank that is slower than the others in most of these lines; None if there is none."""
    slowest = [max(ranks(line), key=lambda each: each.ready_ms) for line in lines]
    slower = [each for each in slowest if each.ratio >= _STRAGGLER_RATIO]
    if not slower:
        return None
    ((rank, count),) = collections.Counter(each.rank for each in slower).most_common(1)
    if count <= len(lines) / 2:
        return None
    is_its = [each.rank == rank and each.ratio >= _STRAGGLER_RATIO for each in slowest]
    # A line of chance before is not the beginning: most lines from there on must be the rank's.
    excess = list(itertools.accumulate(1 if each else -1 for each in reversed(is_its)))[::-1]
    begin = excess.index(max(excess))
    ratio = statistics.median(each.ratio for each, its in zip(slowest, is_its, strict=True) if its)
    return Straggler(rank, count / len(lines), ratio, slowest[begin].first_step)


def _median(line: Mapping[str, Any], name: str) -> float:
    values = sorted(line[name])
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _is_usable(line: Mapping[str, Any]) -> bool:
    has_places = all(isinstance(line.get(name), int) for name in ("first_step", "step", "ranks"))
    lists = [line.get(name) for name in _TIMES]
    has_times = all(isinstance(each, list) and each and all(map(is_finite, each)) for each in lists)
    slowest = line.get("slowest", [])
    has_slowest = isinstance(slowest, list) and all(map(_is_pair, slowest))
    return has_places and has_times and has_slowest


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_finite, value))
