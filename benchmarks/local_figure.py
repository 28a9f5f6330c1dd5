"""Plots docs/images/local_training.svg from the last results of slow_network.py and uneven_ranks.py.

launch/run python benchmarks/local_figure.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "local_training.svg"


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
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(4.4, 7), layout="constrained")
    draw(upper, "2 hosts, 100 Mbit/s, 20 ms round trip", slow["digits, 2 ranks, batch 32, 100 Mbit/s"])
    draw(lower, "4 ranks, one of them at half speed", uneven["runs"])
    FIGURE.parent.mkdir(exist_ok=True)
    with plt.rc_context({"svg.hashsalt": FIGURE.name}):
        figure.savefig(FIGURE, metadata={"Creator": None, "Date": None})


if __name__ == "__main__":
    main()
