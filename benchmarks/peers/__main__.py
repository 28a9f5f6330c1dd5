"""hvdtrain's step against those of its peers: the same networks and batches, in turn.

    launch/run python benchmarks/peers
    launch/run python benchmarks/peers --torch-python /path/to/an/environment/with/torch/bin/python

Prints each peer's time of a step over hvdtrain's in the same turn: median, and range of the middle half of all turns.
A number above 1 says that hvdtrain is faster. Raw Horovod runs in hvdtrain's job; each other peer, hvdtrain with
--jit-compile too, has a job of its own. The jobs of one network are alive together, and while one makes its blocks of
steps the others wait; each is started anew some times, for two models of the same steps differ by some percent for as
long as they live. All draw their batch from an iterator over one, but for PyTorch, which has it at hand. Of the cases
of one peer (one or ten steps in a compiled call; an allreduce for each gradient or one for all) that with the
shortest median counts. On 4 ranks, also the examples per second of all ranks over those of 2. Keeps the last result
for each number of ranks and network in results/peers.json, and draws results/peers.png.
"""

import argparse
import json
import signal
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from jobs import Job, Process, Steps, by_itself, under_mpirun
from samples import BATCH_SIZES

RESULTS = HERE.parent / "results"
FEWER = "hvdtrain on 2 ranks"


def jobs_for(ranks: int, torch_python: str | None) -> list[list[Process]]:
    jobs = [under_mpirun(script, ranks) for script in ("horovod_steps.py", "jit_steps.py")]
    jobs.append(by_itself(sys.executable, "multi_worker.py", ranks))
    if torch_python is not None:
        jobs.append(by_itself(torch_python, "torch_ddp.py", ranks))
    if ranks == 1:
        jobs.append(by_itself(sys.executable, "keras_alone.py", 1))
    return jobs


def take_turns(network: str, ranks: int, num_turns: int, torch_python: str | None) -> list[Steps]:
    """Starts all jobs, and has each make its blocks, one after the other."""
    turns: list[Steps] = []
    with ExitStack() as stack:

        def start(processes: list[Process]) -> Job:
            job = Job(processes, network, num_turns)
            stack.callback(job.end)
            return job

        jobs = [start(processes) for processes in jobs_for(ranks, torch_python)]
        fewer = [start(under_mpirun("horovod_steps.py", 2))] if ranks == 4 else []
        for _ in range(num_turns):
            steps = {peer: found for job in jobs for peer, found in job.turn().items()}
            for job in fewer:
                steps[FEWER] = job.turn()["hvdtrain"]
            turns.append(steps)
    return turns


def steps_of_fastest(turns: list[Steps], peer: str) -> list[float]:
    """The step of each turn, in the case that is fastest by its median."""
    return min(([each[peer][case] for each in turns] for case in turns[0][peer]), key=statistics.median)


def told(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def draw(ratios: dict[str, dict[str, list[float]]], path: Path) -> None:
    """A panel for each number of ranks."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    medians = {
        (int(ranks.split()[0]), peer): {network: statistics.median(values) for network, values in found.items()}
        for (peer, _, ranks), found in ((key.rpartition(", "), found) for key, found in ratios.items())
        if peer != FEWER
    }
    peers = sorted({peer for _, peer in medians})
    numbers = sorted({ranks for ranks, _ in medians})
    figure = Figure(figsize=(5 * len(numbers), 4.5), layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    width = 0.8 / len(peers)
    for ranks, axes in zip(numbers, panels, strict=True):
        for i, peer in enumerate(peers):
            found = medians.get((ranks, peer), {})
            places = [
                j + (i - (len(peers) - 1) / 2) * width for j, network in enumerate(BATCH_SIZES) if network in found
            ]
            heights = [found[network] for network in BATCH_SIZES if network in found]
            axes.bar(places, heights, width, color=f"C{i}")
        axes.axhline(1, color="gray", linestyle="--")
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_xticks(range(len(BATCH_SIZES)), list(BATCH_SIZES))
        axes.set_title(f"{ranks} rank(s)")
    panels[0].set_ylabel("time of a step over hvdtrain's")
    colors = [Patch(color=f"C{i}", label=peer) for i, peer in enumerate(peers)]
    figure.legend(handles=colors, ncols=len(peers), loc="outside lower center")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5, help="of each start")
    parser.add_argument("--networks", nargs="*", default=list(BATCH_SIZES), choices=BATCH_SIZES)
    parser.add_argument("--torch-python", help="the interpreter of an environment with torch and numpy")
    arguments = parser.parse_args()
    if arguments.starts * arguments.turns < 2:
        parser.error(
            f"a spread needs at least two turns in all. Received: --starts {arguments.starts} --turns {arguments.turns}"
        )
    # As at Ctrl-C: the jobs are ended, of which all but one stand still and could not end by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "peers.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    results: dict[str, dict[str, dict[str, list[float]]]] = before.get("step_ms", {})
    ratios: dict[str, dict[str, list[float]]] = before.get("over_hvdtrain", {})
    for ranks in arguments.ranks:
        for network in arguments.networks:
            starts = range(arguments.starts)
            turns = [
                turn for _ in starts for turn in take_turns(network, ranks, arguments.turns, arguments.torch_python)
            ]
            own = steps_of_fastest(turns, "hvdtrain")
            print(f"{ranks} rank(s), {network}: hvdtrain {statistics.median(own):.3f} ms", flush=True)
            for peer, cases in turns[0].items():
                steps = {f"{network}, {case}": [turn[peer][case] for turn in turns] for case in cases}
                results.setdefault(f"{ranks} rank(s)", {}).setdefault(peer, {}).update(steps)
                if peer == "hvdtrain":
                    continue
                values = [other / mine for other, mine in zip(steps_of_fastest(turns, peer), own, strict=True)]
                ratios.setdefault(f"{peer}, {ranks} rank(s)", {})[network] = values
                print(f"{ranks} rank(s), {network}: {peer} takes {told(values)} times as long", flush=True)
                if peer == FEWER:
                    more = [ranks / 2 * value for value in values]
                    print(f"{ranks} rank(s), {network}: {told(more)} of the examples/s of 2 ranks", flush=True)
            # At once: all of them take more than an hour, and what was measured is not to be lost.
            kept.write_text(json.dumps({"step_ms": results, "over_hvdtrain": ratios}, indent=1) + "\n")
            draw(ratios, RESULTS / "peers.png")


if __name__ == "__main__":
    main()
