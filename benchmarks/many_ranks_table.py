"""The table of docs/results.md for 2 to 4,096 ranks, from the saved results of three benchmarks.

    launch/run python benchmarks/many_ranks_table.py

Prints Markdown. Reads results/control_plane.json, startup_at_scale.json and input_at_scale.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (2, 16, 64, 256, 1024, 4096)

Cell = Callable[[dict[str, Any]], str]


def seconds(value: float) -> str:
    """At most two digits that matter, and no more than milliseconds."""
    if value < 0.0005:
        return "< 0.001"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}" if value >= 0.0095 else f"{value:.3f}"


def median(name: str, show: Callable[[float], str] = seconds) -> Cell:
    return lambda row: show(row["steps"]["quartiles"][name][1])


def ratio(name: str) -> Cell:
    """The median, its quartiles, with the share of a heartbeat to all ranks if blocks of steps hold none."""

    def cell(row: dict[str, Any]) -> str:
        steps = row["steps"]
        interval_s = steps["heartbeat_interval_s"]
        burst = steps["quartiles"]["heartbeat_cpu_s"][1] / interval_s if interval_s > 1 else 0.0
        low, middle, high = (f"{each + burst:.3f}" for each in steps["quartiles"][name])
        return f"{middle} ({low}–{high})"

    return cell


def lost(number: int, name: str) -> Cell:
    return lambda row: seconds(row["lost"][str(number)][name]) if str(number) in row["lost"] else ""


def others_ended(row: dict[str, Any]) -> str:
    """Of a single lost rank: with two ranks, no other is left to be ended."""
    return seconds(row["lost"]["1"]["all_ended_s"]) if row["lost"]["1"]["num_told"] else ""


CONTROL_PLANE: dict[str, Cell] = {
    "connect all ranks, s": median("connect_s"),
    "step with / without job watch": ratio("step_cpu_ratio"),
    "monitor thread of rank 0, % of a core": median("monitor_cpu_share", lambda share: f"{100 * share:.1f}"),
    "stop agreed by all ranks, s": median("stop_s"),
    "lost rank named, s": lost(1, "named_s"),
    "all other ranks ended, s": others_ended,
    "64 ranks lost together: named, s": lost(64, "named_s"),
    "64 ranks lost together: all others ended, s": lost(64, "all_ended_s"),
    "descriptors of rank 0": median("descriptors", lambda number: f"{number:,.0f}"),
    "memory of rank 0 for connections, MB": lambda row: f"{max(row['steps']['all_rounds']['memory_mb']):.1f}",
}


def shown(cell: Cell, row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    try:
        return cell(row)
    except KeyError:
        return "failed"


def before_and_after(before: str, after: str) -> str:
    return after if before == after or not after else f"{before} → {after}"


def control_plane() -> list[list[str]]:
    """A line for each measure of the job watch."""
    saved = json.loads((RESULTS / "control_plane.json").read_text())
    lines = []
    for name, cell in CONTROL_PLANE.items():
        both = ([shown(cell, saved.get(when, {}).get(str(ranks))) for when in ("before", "after")] for ranks in RANKS)
        lines.append([name, "simulated", *(before_and_after(*pair) for pair in both)])
    return lines


def start_up() -> list[list[str]]:
    """What a rank receives to compare itself, and what all ranks read when they start."""
    saved = json.loads((RESULTS / "startup_at_scale.json").read_text())
    lines = []
    for name, by_ranks in saved["predicted"].items():
        cells = [before_and_after(*(size(by_ranks[str(ranks)][when]) for when in ("before", "now"))) for ranks in RANKS]
        lines.append([f"a rank receives at the start: {name}", "predicted", *cells])
    opened = [sum(each) for each in zip(*saved["run"]["opened by a rank"].values(), strict=True)]
    lines.append(["files opened by all ranks at the start", "predicted", *(f"{opened[0] * each:,}" for each in RANKS)])
    return lines


def size(num_bytes: float) -> str:
    """A number of bytes with a unit and two digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2g} {unit}" if num_bytes < 99.5 * scale else f"{num_bytes / scale:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def input_of_ranks() -> list[list[str]]:
    """Of a billion samples: their index, which rank 0 makes, and their order, of which each rank draws its part."""
    saved = json.loads((RESULTS / "input_at_scale.json").read_text())
    old = saved["predicted"]["permutation_of_a_billion"]
    stored = f"{old['seconds']:.0f} s, {old['memory_mb'] / 1000:.1f} GB"
    draws = (saved["run"]["orders_by_ranks"][str(ranks)]["draw_ms"] for ranks in RANKS)
    orders = [before_and_after(stored, f"{each:.1f} ms") for each in draws]
    index = f"{saved['predicted']['scan_billion_records_s'] / 60:.0f}"
    return [
        ["a billion samples: make their index once, min", "predicted", *[index] * len(RANKS)],
        ["a billion samples: find a rank's batch in random order", "predicted → run on one rank", *orders],
    ]


def main() -> None:
    print("|", " | ".join(["measure, before → after", "how", *(f"{ranks:,}" for ranks in RANKS)]), "|")
    print("|" + "---|" * (2 + len(RANKS)))
    for line in [*control_plane(), *start_up(), *input_of_ranks()]:
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    main()
