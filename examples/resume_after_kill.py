"""Kills a run, restarts it, and checks that the final weights are bit-identical to those of an uninterrupted run.

launch/run python examples/resume_after_kill.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

OPTIONS = ["--steps", "200", "--checkpoint-every", "25", "--deterministic", "--log-every", "50"]


def train(run_dir, *more):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m", "hvdtrain"]
    return subprocess.Popen([*command, "--run-dir", str(run_dir), *OPTIONS, *more])


def digest(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]


with tempfile.TemporaryDirectory() as folder:
    uninterrupted, killed = Path(folder) / "uninterrupted", Path(folder) / "killed"
    train(uninterrupted).wait()

    job = train(killed)
    # Kill it as soon as there is a checkpoint.
    while not list(killed.glob("checkpoints/step-*")):
        time.sleep(0.1)
    for process in psutil.Process(job.pid).children(recursive=True):
        process.kill()
    print(f"killed: the job ended with exit code {job.wait()}", flush=True)

    train(killed, "--resume", "must").wait()
    print(f"uninterrupted: {digest(uninterrupted)}\nkilled and resumed: {digest(killed)}")
    sys.exit(digest(uninterrupted) != digest(killed))
