"""The chart of results/peers.svg."""

import statistics
from pathlib import Path

from samples import BATCH_SIZES


def draw(ratios: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Plots a panel for each place: a number of ranks, or of hosts with a network.

    Args:
        ratios: by peer and place, separated by a comma, and by network.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    medians = {
        (place, peer): {network: statistics.median(values) for network, values in found.items()}
        for (peer, _, place), found in ((key.rpartition(", "), found) for key, found in ratios.items())
    }
    peers = sorted({peer for _, peer in medians})
    places = sorted({place for place, _ in medians})
    figure = Figure(figsize=(4.4, 2.3 * len(places) + 0.9), layout="constrained")
    panels = figure.subplots(len(places), 1, sharex=True, squeeze=False)[:, 0]
    width = 0.8 / len(peers)
    for place, axes in zip(places, panels, strict=True):
        for i, peer in enumerate(peers):
            found = medians.get((place, peer), {})
            positions = [
                j + (i - (len(peers) - 1) / 2) * width for j, network in enumerate(BATCH_SIZES) if network in found
            ]
            heights = [found[network] for network in BATCH_SIZES if network in found]
            axes.bar(positions, heights, width, color=f"C{i}")
        axes.axhline(1, color="gray", linestyle="--")
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_xticks(range(len(BATCH_SIZES)), list(BATCH_SIZES))
        axes.tick_params(labelbottom=True)
        axes.set_title(place)
    figure.supylabel("step time relative to hvdtrain's")
    colors = [Patch(color=f"C{i}", label=peer) for i, peer in enumerate(peers)]
    figure.legend(handles=colors, ncols=2, loc="outside lower center")
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Creator": None, "Date": None})
