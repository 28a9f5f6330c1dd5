"""Time from start to the first step, by phase: two ranks of hvdtrain and one of plain Keras, interleaved.

    launch/run python benchmarks/startup.py

Both train the digits with the same network and batch. Plain Keras imports TensorFlow, builds the model and fits one
batch; hvdtrain is started as by a user, with launch/run horovodrun -np 2, and its ranks record the end of each phase.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAIN = """
import os, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
from hvdtrain.tasks import digits
data = digits.read_data(None).training
import numpy as np
model = digits.make_model()
model.compile(optimizer="adam", loss=digits.TASK.loss(), metrics=digits.TASK.metrics())
model.fit(np.zeros((32, 8, 8, 1), np.float32), np.zeros(32, np.int32), batch_size=32, verbose=0)
print("FIRST", time.time())
"""


def rank(run_dir: str) -> None:
    """Runs ``python -m hvdtrain`` and records when each phase ends."""
    moments = {"launcher and Python": time.time()}
    from hvdtrain.system import environment, tensorflow_start

    tensorflow_start.import_tensorflow()
    import tensorflow  # noqa: F401

    moments["importing TensorFlow"] = time.time()
    from hvdtrain.commands.cli import main
    from hvdtrain.distributed import runtime
    from hvdtrain.training.train_step import TrainStep

    moments["importing hvdtrain and Keras"] = time.time()
    init, run = runtime.init, TrainStep.run

    def recorded_init(**options):
        made = init(**options)
        moments.setdefault("starting Horovod", time.time())
        return made

    def recorded_run(*arguments):
        moments.setdefault("data, model, comparison of ranks", time.time())
        run(*arguments)
        if "first step, which compiles" not in moments:
            moments["first step, which compiles"] = time.time()
            if environment.launcher().rank == 0:
                print("MOMENTS " + json.dumps(moments), flush=True)

    runtime.init, TrainStep.run = recorded_init, recorded_run
    sys.exit(main(["--steps", "2", "--run-dir", run_dir]))


def plain_s() -> float:
    began_s = time.time()
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    return float(done.stdout.split("FIRST ")[1].split()[0]) - began_s


def job_s(folder: Path) -> dict[str, float]:
    """The seconds of each phase."""
    began_s = time.time()
    command = [str(ROOT / "launch" / "run"), "horovodrun", "-np", "2", "python", __file__, "--rank", str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if "MOMENTS" not in done.stdout:
        sys.exit(f"the job failed:\n{done.stdout}\n{done.stderr}")
    moments = json.JSONDecoder().raw_decode(done.stdout.split("MOMENTS ")[1])[0]
    ends = [began_s, *moments.values()]
    return {name: ends[i + 1] - ends[i] for i, name in enumerate(moments)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank)
    plain, jobs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.repeats):
            plain.append(plain_s())
            jobs.append(job_s(Path(folder) / str(i)))
    for name in jobs[0]:
        values = [job[name] for job in jobs]
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    ratios = [sum(job.values()) / each for job, each in zip(jobs, plain, strict=True)]
    print(f"hvdtrain on 2 ranks: {statistics.median(sum(job.values()) for job in jobs):.2f} s to the first step")
    print(f"plain Keras: {statistics.median(plain):.2f} s")
    print(f"ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} repetitions)")


if __name__ == "__main__":
    main()
