"""Soak test: ``launch/run python tests/parallel/soak.py --kills 20``.

Repeatedly sends SIGKILL or SIGTERM to a random rank, at random times, during a run of a few hundred steps under
``launch/run --restarts``; compares its final weights with those of an uninterrupted run.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from launcher import ROOT, Job, run_job

STEPS, CHECKPOINT_EVERY = 600, 25
MAX_LIFETIME_S = 10.0
# Large batches: the steps must take long enough for all kills to happen during the run.
OPTIONS = ["--deterministic", "--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--batch-size", "512"]


def soak(kills: int, seed: int, folder: Path) -> int:
    """Prints a line per kill; returns the number of kills.

    Raises:
        AssertionError: the run failed, or its results differ from the uninterrupted run's.
    """
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--run-dir"]
    uninterrupted = run_job([*train, str(folder / "uninterrupted")], ranks=2, timeout_s=120)
    assert uninterrupted.code == 0, uninterrupted.output
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command = [str(ROOT / "launch" / "run"), "--restarts", str(kills), "--restart-pause", "0.2", *mpirun]
    job = Job([*command, *train, str(folder / "run")], ranks=2, launcher="")
    generator, kills_done = random.Random(seed), list[str]()
    try:
        while len(kills_done) < kills and job.is_running:
            number = generator.choice([signal.SIGKILL, signal.SIGTERM])
            rank = generator.randrange(2)
            ranks = [job.rank(0), job.rank(1)]
            # Measured from the job's start: a kill before a new checkpoint lengthens the next restart pause.
            time.sleep(generator.uniform(0.5, MAX_LIFETIME_S))
            if not job.is_running:
                break  # the run ended before the kill
            os.kill(ranks[rank], number)
            checkpoints = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-????????"))
            kills_done.append(
                f"{number.name} to rank {rank}, last checkpoint {checkpoints[-1] if checkpoints else 'none'}"
            )
            print(kills_done[-1], flush=True)
            deadline_s = time.time() + 10
            while not job.processes().keys().isdisjoint(ranks):
                assert time.time() < deadline_s, "a rank outlived the signal"
                time.sleep(0.05)
        ended = job.end(180)
    finally:
        job.kill()
    assert ended.code == 0, ended.output
    one, other = (json.loads((folder / name / "summary.json").read_text()) for name in ("uninterrupted", "run"))
    for name in ("weights_sha256", "loss", "metrics", "eval", "steps", "samples"):
        assert one[name] == other[name], (name, one[name], other[name])
    return len(kills_done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = soak(arguments.kills, arguments.seed, Path(folder))
    print(f"{kills} kills: the same weights, loss, metrics and evaluation as an uninterrupted run")


if __name__ == "__main__":
    main()
