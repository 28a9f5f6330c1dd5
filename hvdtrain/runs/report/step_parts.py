"""Where the time of steps went, by rank: from the lines of ``ranks.jsonl``."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.runs.run_record import is_finite

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


def slowest_rank(lines: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """The rank that was the slowest in most of these lines, and the share of the lines."""
    counts = collections.Counter(max(ranks(line), key=lambda each: each.ready_ms).rank for line in lines)
    ((rank, count),) = counts.most_common(1)
    return rank, count / len(lines)


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
