"""Step times of hvdtrain and its peers on the same networks and batches, interleaved.

    launch/run python benchmarks/peers
    launch/run python benchmarks/peers --torch-python ENVIRONMENT/bin/python --jax-python ENVIRONMENT/bin/python
    launch/run python benchmarks/peers --ranks 2 --rates-mbit 1000    # as root, with iproute2 and openssh-server

The environments of the second line have torch, numpy and keras-nightly (the first with data parallelism on PyTorch),
and jax and keras. The third line measures ranks on hosts of the lab, over links of this rate and 0.5 ms of delay.

Prints the ratio of each peer's step time to hvdtrain's in the same turn: median and quartiles over all turns. A ratio
above 1 means that hvdtrain is faster. Raw Horovod runs in hvdtrain's job; every other peer, including hvdtrain with
--jit-compile, has its own job. The jobs of a network run concurrently and take turns: while one runs its blocks of
steps, the others are stopped. All are restarted several times, because two models with the same steps differ
persistently by a few percent. All read their batch from an iterator that repeats it, except PyTorch and JAX, which hold
it in memory. For each trainer the case with the lowest median counts (one or ten steps per call; compiled or not; an
allreduce per gradient or one for all; between hosts, MPI or Gloo). On 4 ranks, also prints examples/s relative to 2
ranks. Saves the last result for each number of ranks and network to results/peers.json and plots results/peers.svg.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent.parent / "launch" / "lab"))

from chart import draw
from jobs import Job, Steps
from laboratory import Laboratory
from places import Hosts, Place, Process, ThisMachine
from samples import BATCH_SIZES

RESULTS = HERE.parent / "results"
FEWER = "hvdtrain on 2 ranks"
DELAY_MS = 0.5


@contextmanager
def place_of(ranks: int, rate_mbit: int | None) -> Iterator[Place]:
    """This machine, or hosts of the lab, if a rate is given."""
    if rate_mbit is None:
        yield ThisMachine()
        return
    with Laboratory(ranks, rate_mbit=rate_mbit, delay_ms=DELAY_MS) as lab:
        yield Hosts(lab)


def jobs_for(place: Place, ranks: int, pythons: dict[str, str]) -> list[list[Process]]:
    """The commands of each job.

    Args:
        pythons: script of a peer without TensorFlow to the interpreter that runs it.
    """
    scripts = ("horovod_steps.py", "jit_steps.py")
    jobs = [[process] for script in scripts for process in place.under_launchers(script, ranks)]
    jobs.append(place.without_launcher(sys.executable, "multi_worker.py", ranks))
    jobs += [place.without_launcher(python, script, ranks) for script, python in pythons.items()]
    if ranks == 1:
        jobs.append(place.without_launcher(sys.executable, "keras_alone.py", 1))
    return jobs


def take_turns(place: Place, network: str, ranks: int, num_turns: int, pythons: dict[str, str]) -> list[Steps]:
    """Starts all jobs and lets them run their blocks in turn."""
    turns: list[Steps] = []
    with ExitStack() as stack:

        def start(processes: list[Process]) -> Job:
            job = Job(processes, network, num_turns)
            stack.callback(job.end)
            return job

        jobs = [start(processes) for processes in jobs_for(place, ranks, pythons)]
        has_fewer = ranks == 4 and isinstance(place, ThisMachine)
        fewer = [start(place.under_launchers("horovod_steps.py", 2))] if has_fewer else []
        for _ in range(num_turns):
            steps: Steps = {}
            for job in jobs:
                for peer, cases in job.turn().items():
                    steps.setdefault(peer, {}).update(cases)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rates-mbit", type=int, nargs="*", default=[None], help="between hosts of the lab")
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
    for ranks, rate_mbit, network in itertools.product(arguments.ranks, arguments.rates_mbit, arguments.networks):
        name = f"{ranks} rank(s)" if rate_mbit is None else f"{ranks} hosts at {rate_mbit} Mbit/s"
        turns: list[Steps] = []
        for _ in range(arguments.starts):
            with place_of(ranks, rate_mbit) as place:
                turns += take_turns(place, network, ranks, arguments.turns, pythons)
        own = steps_of_fastest(turns, "hvdtrain")
        print(f"{name}, {network}: hvdtrain {statistics.median(own):.3f} ms", flush=True)
        for peer, cases in turns[0].items():
            steps = {f"{network}, {case}": [turn[peer][case] for turn in turns] for case in cases}
            results.setdefault(name, {}).setdefault(peer, {}).update(steps)
            if peer == "hvdtrain":
                continue
            values = [other / mine for other, mine in zip(steps_of_fastest(turns, peer), own, strict=True)]
            print(f"{name}, {network}: {peer} takes {formatted(values)}x as long", flush=True)
            if peer == FEWER:
                more = [ranks / 2 * value for value in values]
                print(f"{name}, {network}: {formatted(more)}x the examples/s of 2 ranks", flush=True)
            else:
                ratios.setdefault(f"{peer}, {name}", {})[network] = values
        # Saved immediately: a complete run takes more than an hour.
        kept.write_text(json.dumps({"step_ms": results, "over_hvdtrain": ratios}, indent=1) + "\n")
        draw(ratios, RESULTS / "peers.svg")


if __name__ == "__main__":
    main()
