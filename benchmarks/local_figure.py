"""Plots docs/local_training.png from the last results of slow_network.py and uneven_ranks.py.

launch/run python benchmarks/local_figure.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "local_training.png"


def draw(axes: Any, title: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Plots the first run of each mode."""
    for mode, each in runs.items():
        seconds, losses = zip(*each[0]["curve"], strict=True)
        axes.plot(seconds, losses, label=mode)
    axes.set(title=title, xlabel="seconds", ylabel="loss on the test images", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    slow = json.loads((RESULTS / "slow_network.json").read_text())
    uneven = json.loads((RESULTS / "uneven_ranks-mpi.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw(left, "2 hosts, 100 Mbit/s, 20 ms round trip", slow["2"])
    draw(right, "4 ranks, one of them at half speed", uneven["runs"])
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    main()
