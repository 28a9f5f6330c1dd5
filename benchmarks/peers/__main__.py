"""Step times of hvdtrain and its peers on the same networks and batches, interleaved.

    launch/run python benchmarks/peers
    launch/run python benchmarks/peers --torch-python ENVIRONMENT/bin/python --jax-python ENVIRONMENT/bin/python

The environments of the second line have torch, numpy and keras-nightly (the first with data parallelism on PyTorch),
and jax and keras.

Prints the ratio of each peer's step time to hvdtrain's in the same turn: median and quartiles over all turns. A ratio
above 1 means that hvdtrain is faster. Raw Horovod runs in hvdtrain's job; every other peer, including hvdtrain with
--jit-compile, has its own job. The jobs of a network run concurrently and take turns: while one runs its blocks of
steps, the others are stopped. All are restarted several times, because two models with the same steps differ
persistently by a few percent. All read their batch from an iterator that repeats it, except PyTorch and JAX, which hold
it in memory. For each peer the case with the lowest median counts (one or ten steps per call; compiled or not; an
allreduce per gradient or one for all). On 4 ranks, also prints examples/s relative to 2 ranks. Saves the last result
for each number of ranks and network to results/peers.json and plots results/peers.svg.
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

from jobs import Job, Process, Steps, under_mpirun, without_launcher
from samples import BATCH_SIZES

RESULTS = HERE.parent / "results"
FEWER = "hvdtrain on 2 ranks"


def jobs_for(ranks: int, pythons: dict[str, str]) -> list[list[Process]]:
    """The commands of each job.

    Args:
        pythons: script of a peer without TensorFlow to the interpreter that runs it.
    """
    jobs = [under_mpirun(script, ranks) for script in ("horovod_steps.py", "jit_steps.py")]
    jobs.append(without_launcher(sys.executable, "multi_worker.py", ranks))
    jobs += [without_launcher(python, script, ranks) for script, python in pythons.items()]
    if ranks == 1:
        jobs.append(without_launcher(sys.executable, "keras_alone.py", 1))
    return jobs


def take_turns(network: str, ranks: int, num_turns: int, pythons: dict[str, str]) -> list[Steps]:
    """Starts all jobs and lets them run their blocks in turn."""
    turns: list[Steps] = []
    with ExitStack() as stack:

        def start(processes: list[Process]) -> Job:
            job = Job(processes, network, num_turns)
            stack.callback(job.end)
            return job

        jobs = [start(processes) for processes in jobs_for(ranks, pythons)]
        fewer = [start(under_mpirun("horovod_steps.py", 2))] if ranks == 4 else []
        for _ in range(num_turns):
            steps = {peer: found for job in jobs for peer, found in job.turn().items()}
            for job in fewer:
                steps[FEWER] = job.turn()["hvdtrain"]
            turns.append(steps)
    return turns


def steps_of_fastest(turns: list[Steps], peer: str) -> list[float]:
    """The step times of all turns, for the case with the lowest median."""
    return min(([each[peer][case] for each in turns] for case in turns[0][peer]), key=statistics.median)


def formatted(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def draw(ratios: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Plots a panel for each number of ranks."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    medians = {
        (int(ranks.split()[0]), peer): {network: statistics.median(values) for network, values in found.items()}
        for (peer, _, ranks), found in ((key.rpartition(", "), found) for key, found in ratios.items())
        if peer != FEWER
    }
    peers = sorted({peer for _, peer in medians})
    numbers = sorted({ranks for ranks, _ in medians})
    figure = Figure(figsize=(4.4, 2.3 * len(numbers) + 0.9), layout="constrained")
    panels = figure.subplots(len(numbers), 1, sharex=True, squeeze=False)[:, 0]
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
        axes.tick_params(labelbottom=True)
        axes.set_title(f"{ranks} rank(s)")
    figure.supylabel("step time relative to hvdtrain's")
    colors = [Patch(color=f"C{i}", label=peer) for i, peer in enumerate(peers)]
    figure.legend(handles=colors, ncols=2, loc="outside lower center")
    with rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Creator": None, "Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5, help="turns per start")
    parser.add_argument("--networks", nargs="*", default=list(BATCH_SIZES), choices=BATCH_SIZES)
    parser.add_argument("--torch-python", help="the interpreter of an environment with torch, numpy and keras-nightly")
    parser.add_argument("--jax-python", help="the interpreter of an environment with jax and keras")
    arguments = parser.parse_args()
    if arguments.starts * arguments.turns < 2:
        parser.error(
            f"quartiles need at least two turns. Received: --starts {arguments.starts} --turns {arguments.turns}"
        )
    pythons = {
        script: python
        for script, python in (
            ("torch_ddp.py", arguments.torch_python),
            ("keras_torch.py", arguments.torch_python),
            ("keras_jax.py", arguments.jax_python),
        )
        if python is not None
    }
    # Clean up as on Ctrl-C: stopped jobs could not exit by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "peers.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    results: dict[str, dict[str, dict[str, list[float]]]] = before.get("step_ms", {})
    ratios: dict[str, dict[str, list[float]]] = before.get("over_hvdtrain", {})
    for ranks in arguments.ranks:
        for network in arguments.networks:
            starts = range(arguments.starts)
            turns = [turn for _ in starts for turn in take_turns(network, ranks, arguments.turns, pythons)]
            own = steps_of_fastest(turns, "hvdtrain")
            print(f"{ranks} rank(s), {network}: hvdtrain {statistics.median(own):.3f} ms", flush=True)
            for peer, cases in turns[0].items():
                steps = {f"{network}, {case}": [turn[peer][case] for turn in turns] for case in cases}
                results.setdefault(f"{ranks} rank(s)", {}).setdefault(peer, {}).update(steps)
                if peer == "hvdtrain":
                    continue
                values = [other / mine for other, mine in zip(steps_of_fastest(turns, peer), own, strict=True)]
                ratios.setdefault(f"{peer}, {ranks} rank(s)", {})[network] = values
                print(f"{ranks} rank(s), {network}: {peer} takes {formatted(values)}x as long", flush=True)
                if peer == FEWER:
                    more = [ranks / 2 * value for value in values]
                    print(f"{ranks} rank(s), {network}: {formatted(more)}x the examples/s of 2 ranks", flush=True)
            # Saved immediately: a complete run takes more than an hour.
            kept.write_text(json.dumps({"step_ms": results, "over_hvdtrain": ratios}, indent=1) + "\n")
            draw(ratios, RESULTS / "peers.svg")


if __name__ == "__main__":
    main()
