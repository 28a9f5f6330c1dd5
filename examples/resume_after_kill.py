"""A run that is killed, started again, and comes to what it would have come to: the same weights, bit for bit.

launch/run python examples/resume_after_kill.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = ["--steps", "200", "--checkpoint-every", "25", "--deterministic", "--log-every", "50"]


def train(run_dir, *more):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m", "hvdtrain"]
    return subprocess.Popen([*command, "--run-dir", str(run_dir), *OPTIONS, *more])


def digest(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]


with tempfile.TemporaryDirectory() as folder:
    whole, killed = Path(folder) / "whole", Path(folder) / "killed"
    train(whole).wait()

    job = train(killed)
    # As soon as there is a checkpoint, and much work is not in it.
    while not list(killed.glob("checkpoints/step-*")):
        time.sleep(0.1)
    subprocess.run(["pkill", "-9", "-f", f"hvdtrain --run-dir {killed}"], check=False)
    print(f"killed: the job ended with exit code {job.wait()}", flush=True)

    train(killed, "--resume", "must").wait()
    print(f"without a break: {digest(whole)}\nkilled and resumed: {digest(killed)}")
    sys.exit(digest(whole) != digest(killed))
