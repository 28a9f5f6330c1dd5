"""Random kills over one run: ``launch/run python tests/parallel/soak.py --kills 20``.

A run of a few hundred steps under ``launch/run --restarts`` is struck by SIGKILL or SIGTERM, on a random
rank at a random moment, again and again; its weights in the end are compared with those of a run that was
left alone.
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
LONGEST_LIFE_S = 10.0
# Large batches, so that a step takes long enough for a run to outlive all kills.
OPTIONS = ["--deterministic", "--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY), "--batch-size", "512"]


def soak(kills: int, seed: int, folder: Path) -> int:
    """Prints what is done, a line each, and gives back how many kills it were.

    Raises:
        AssertionError: the run did not end well, or with other weights.
    """
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--run-dir"]
    alone = run_job([*train, str(folder / "alone")], ranks=2, timeout_s=120)
    assert alone.code == 0, alone.output
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    supervised = [str(ROOT / "launch" / "run"), "--restarts", str(kills), "--restart-pause", "0.2", *mpirun]
    job = Job([*supervised, *train, str(folder / "run")], ranks=2, launcher="")
    generator, done = random.Random(seed), list[str]()
    try:
        while len(done) < kills and job.is_running:
            number = generator.choice([signal.SIGKILL, signal.SIGTERM])
            rank = generator.randrange(2)
            ranks = [job.rank(0), job.rank(1)]
            # From its start on: a life that is shorter than the start makes the pause before the next one longer.
            time.sleep(generator.uniform(0.5, LONGEST_LIFE_S))
            if not job.is_running:
                break  # it has outrun the kills
            os.kill(ranks[rank], number)
            checkpoints = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-????????"))
            done.append(f"{number.name} to rank {rank}, last checkpoint {checkpoints[-1] if checkpoints else 'none'}")
            print(done[-1], flush=True)
            deadline_s = time.time() + 10
            while not job.processes().keys().isdisjoint(ranks):
                assert time.time() < deadline_s, "a rank outlived the signal"
                time.sleep(0.05)
        ended = job.end(180)
    finally:
        job.kill()
    assert ended.code == 0, ended.output
    one, other = (json.loads((folder / name / "summary.json").read_text()) for name in ("alone", "run"))
    for name in ("weights_sha256", "loss", "metrics", "eval", "steps", "samples"):
        assert one[name] == other[name], (name, one[name], other[name])
    return len(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = soak(arguments.kills, arguments.seed, Path(folder))
    print(f"{kills} kills: the same weights, loss, metrics and evaluation as those of a run left alone")


if __name__ == "__main__":
    main()
