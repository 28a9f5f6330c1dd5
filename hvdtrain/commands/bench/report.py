"""The bench report: a table and a figure."""

from pathlib import Path
from typing import Any

from hvdtrain.commands.bench.cases import ALONE, INDEPENDENT, SYNC
from hvdtrain.commands.figures import make_figure
from hvdtrain.commands.tables import aligned

_MARK = "*"
_SHARES = ("input", "compute", "communication")


def table(found: dict[str, Any]) -> str:
    """Formats the results for the console."""
    cells = [("", "ms/step", "p50", "p95", "spread", "examples/s", "CPU s/step")]
    for name, case in found["cases"].items():
        times = (f"{case[each]:.3f}" for each in ("step_ms", "step_ms_p50", "step_ms_p95"))
        spread = f"{case['spread']:.1%}{_MARK if case['unsteady'] else ' '}"
        cpu = f"{case['cpu_seconds_per_step']:.5f}"
        cells.append((name, *times, spread, f"{case['examples_per_second']:.0f}", cpu))
    lines = aligned(cells)
    for name, ratio in found["ratios"].items():
        one, _, other = name.partition(" over ")
        mark = _MARK if found["cases"][one]["unsteady"] or found["cases"][other]["unsteady"] else ""
        lines.append(f"{name}: {ratio['median']:.3f}{mark} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    if "shares" in found:
        shares = found["shares"]
        lines.append("of a sync step: " + ", ".join(f"{name} {shares[f'{name}_fraction']:.1%}" for name in _SHARES))
        lines.append(f"scaling efficiency (over independent ranks): {found['scaling_efficiency']:.3f}")
        lines += _straggler(shares["skew"])
    sent = found.get("bytes_per_step", {})
    for name, size in sent.items():
        less = "" if name == SYNC else f", 1/{sent[SYNC] / size:.1f} of those of {SYNC}"
        lines.append(f"gradients of a step, {name}: {size:,} bytes{less}")
    if "recommended_compression" in found:
        lines.append(f"recommended: --compression {found['recommended_compression']}")
    for name, copy in found.get("copies", {}).items():
        lines.append(f"copy, {name}: {1000 * copy['seconds']:.3f} ms for {copy['bytes']:,} bytes")
    for row in found["network"]["allreduce"] if "network" in found else ():
        comparison = "" if row["over_mpi"] is None else f", {row['over_mpi']:.2f}x the time of a bare MPI_Allreduce"
        lines.append(
            f"allreduce of {row['bytes']:,} bytes: {1000 * row['seconds']:.3f} ms{comparison}, each rank sends "
            f"{row['sent_bits_per_second'] / 1e6:.0f} Mbit/s"
        )
    for host, speed in found["network"]["link_bits_per_second"].items() if "network" in found else ():
        bandwidth = "cannot be reached over TCP" if speed is None else f"{speed / 1e6:.0f} Mbit/s"
        lines.append(f"one connection to {host}: {bandwidth}")
    if "network" in found:
        lines += _waiting(found)
    lines += [f"{_MARK} unsteady: {case['unsteady']}" for case in found["cases"].values() if case["unsteady"]]
    return "\n".join(lines)


def _waiting(found: dict[str, Any]) -> list[str]:
    """What communication costs in CPU time, and a remedy if MPI polls between hosts."""
    sync, independent = (found["cases"][name]["cpu_seconds_per_step"] for name in (SYNC, INDEPENDENT))
    cpu_ms = 1000 * (sync - independent) / found["ranks"]
    busy = found["network"]["busy_cores"]
    line = f"communication: {cpu_ms:.1f} ms of CPU time per rank and step; a rank in an allreduce uses {busy:.2f} cores"
    polling = found["network"]["polling"]
    return [line] if polling is None else [line, polling]


def _straggler(skew: dict[str, Any] | None) -> list[str]:
    if skew is None or skew["remedy"] is None:
        return []
    return [
        f"rank {skew['slowest_rank']} (host {skew['slowest_host']}) is last in {skew['slowest_share']:.0%} of steps, "
        f"{skew['ratio']:.2f} times the median",
        f"recommended: {skew['remedy']['option']}, about {skew['remedy']['speedup']:.2f} times as many samples/s",
    ]


def draw(found: dict[str, Any], path: Path) -> bool:
    """Plots examples/s of all cases and the breakdown of a sync step; returns False if matplotlib is missing."""
    figure = make_figure(figsize=(4.4, 4.4), layout="constrained")
    if figure is None:
        return False
    speeds, times = figure.subplots(2, 1, height_ratios=(3, 1))
    names = list(reversed(found["cases"]))
    labels = [f"{name} (unsteady)" if found["cases"][name]["unsteady"] else name for name in names]
    bars = speeds.barh(labels, [found["cases"][name]["examples_per_second"] for name in names], color="tab:blue")
    speeds.bar_label(bars, fmt="{:,.0f}", padding=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    ideal = found["ranks"] * found["cases"][ALONE]["examples_per_second"]
    speeds.axvline(ideal, color="gray", linestyle="--", label=f"{found['ranks']} x one rank alone")
    speeds.set_xlabel("examples/s, all ranks")
    speeds.margins(x=0.12)
    speeds.set_title(f"{found['task']}, {found['ranks']} rank(s) on {found['hosts']} host(s)")
    left = 0.0
    for name, color in zip(_SHARES, ("tab:orange", "tab:green", "tab:red"), strict=True):
        share = found["shares"][f"{name}_fraction"]
        times.barh(["step"], [share], left=[left], color=color, label=f"{name} {share:.1%}")
        left += share
    times.set_xlim(0, max(1.0, left))
    handles = [*speeds.get_legend_handles_labels()[0], *times.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=160)
    return True
