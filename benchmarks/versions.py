"""Step times of this checkout relative to another one's, such as the commit before, interleaved.

    git worktree add ../before HEAD~1
    launch/run python benchmarks/versions.py ../before
    launch/run python benchmarks/versions.py ../before --other-python ../before/.venvs/DIGEST/bin/python

The second where the other checkout builds another Horovod.

A job of each checkout is started, several times, because two models with the same steps differ persistently by a few
percent. The two jobs take turns: while one runs its blocks of steps, the other is stopped. Prints the ratio of step
times of this checkout to the other's: for each start the median over its turns; of these the median and the range. The
same checkout twice (``versions.py .``) shows how much two equal versions differ on this machine.
"""

import argparse
import signal
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from jobs import Job, Steps
from places import MPIRUN
from samples import BATCH_SIZES


def start_job(checkout: Path, python: str, network: str, ranks: int, num_turns: int) -> Job:
    places = (checkout, checkout / "benchmarks", checkout / "benchmarks" / "peers")
    env = {"PYTHONPATH": ":".join(map(str, places))}
    command = [*MPIRUN, "-np", str(ranks), python, str(HERE / "version_steps.py")]
    return Job([(command, env)], network, num_turns)


def ratios_of_start(
    other: tuple[Path, str], network: str, ranks: int, num_turns: int, *, other_first: bool
) -> dict[str, float]:
    """This checkout's step time over the other's, for each number of steps per call: the median over turns."""
    this = HERE.parent, sys.executable
    order = [other, this] if other_first else [this, other]
    with ExitStack() as stack:
        jobs = []
        for checkout, python in order:
            jobs.append(start_job(checkout, python, network, ranks, num_turns))
            stack.callback(jobs[-1].end)
        turns: list[list[Steps]] = [[job.turn() for job in jobs] for _ in range(num_turns)]
    found = {}
    for case in turns[0][0]["steps"]:
        pairs = [[steps["steps"][case] for steps in turn] for turn in turns]
        found[case] = statistics.median(b / a if other_first else a / b for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--other-python", default=sys.executable, help="the interpreter of the other's environment")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8, help="turns per start")
    parser.add_argument("--networks", nargs="*", default=list(BATCH_SIZES), choices=BATCH_SIZES)
    arguments = parser.parse_args()
    # Clean up as on Ctrl-C: stopped jobs could not exit by themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for ranks in arguments.ranks:
        for network in arguments.networks:
            starts = [
                ratios_of_start(
                    (arguments.other.resolve(), arguments.other_python),
                    network,
                    ranks,
                    arguments.turns,
                    other_first=i % 2 == 0,
                )
                for i in range(arguments.starts)
            ]
            for case in starts[0]:
                values = [found[case] for found in starts]
                print(
                    f"{ranks} rank(s), {network}, {case}: {statistics.median(values):.3f} "
                    f"({min(values):.3f} to {max(values):.3f}) over {len(values)} starts",
                    flush=True,
                )


if __name__ == "__main__":
    main()
