"""Final loss of local SGD whose ranks are killed, compared with the same jobs without failures, and with sync mode.

    launch/run python benchmarks/learning_with_failures.py

Each job trains the transformer of ``learning_tasks.py`` on two processes, which are elastic, for 400 steps, the same
global batches in all of them. A sleep makes steps long enough for newcomers to arrive. In some jobs, one of the two
processes, chosen at random, is killed (SIGKILL) twice, at steps chosen at random; another takes its place. Prints
the loss of the averaged model, mean and two standard deviations of some seeds; its difference from sync mode, the mean
of the differences of equal seeds, and its 95 % confidence interval; and how many steps of ranks were lost. Keeps them
in results/learning_with_failures.json.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf
from keras import layers
from learning_tasks import TRANSFORMER, transformer
from paired_losses import cell

import hvdtrain

RESULTS = Path(__file__).resolve().parent / "results" / "learning_with_failures.json"
RANKS, GLOBAL_BATCH, STEPS, STEP_S, KILLS = 2, 64, 400, 0.1, 2
SYNC_EVERY = 16
LOCAL = ["--mode", "local", "--sync-every", str(SYNC_EVERY)]
WAYS: dict[str, tuple[list[str], int]] = {
    "sync": (["--mode", "sync"], 0),
    "H=16": (LOCAL, 0),
    "H=16, failures": (LOCAL, KILLS),
    "H=16, wait-free": ([*LOCAL, "--wait-free"], 0),
    "H=16, wait-free, failures": ([*LOCAL, "--wait-free"], KILLS),
}
"""Options of the training, and how many processes are killed."""


@keras.saving.register_keras_serializable()
class Sleep(layers.Layer):
    """Takes a time for each step of training."""

    def call(self, tokens: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return tokens

        def sleep() -> int:
            time.sleep(STEP_S)
            return 0

        with tf.control_dependencies([tf.numpy_function(sleep, [], tf.int64)]):
            return tf.identity(tokens)


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    network = transformer()
    return keras.Sequential([layers.Input(network.input_shape[1:], dtype="int32"), Sleep(), network])


TASK = hvdtrain.Task(
    model=make_model,
    data=TRANSFORMER.data,
    loss=TRANSFORMER.loss,
    defaults={"learning_rate": 3e-3, "lr_decay": "none", "log_every": 5, "eval_every": STEPS, "check_every": 0},
)


def last_step(run: Path) -> int:
    """The last step that a run has logged."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    # The last line may be incomplete.
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((event["step"] for event in events if event["event"] == "train"), default=0)


def train(options: list[str], kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Trains in an elastic job, in which processes are killed."""
    generator = random.Random(seed)
    at_steps = [(i + generator.uniform(0.1, 0.6)) * STEPS / kills for i in range(kills)]
    run, output = folder / "run", folder / "output"
    hvdtrain_command = [sys.executable, "-m", "hvdtrain"]
    line = [*hvdtrain_command, "elastic", f"1:{RANKS}", "--np", str(RANKS), *hvdtrain_command]
    line += ["--task", __file__, "--run-dir", str(run), "--steps", str(STEPS), "--seed", str(seed)]
    line += ["--global-batch-size", str(GLOBAL_BATCH), "--checkpoint-every", "0", *options]
    with output.open("w") as file:
        job = subprocess.Popen(line, stdout=file, stderr=file)
    generations: list[str] = []
    began_at = 0
    try:
        while job.poll() is None:
            found = re.findall(r"generation \d+: (\d+) rank", output.read_text())
            if found != generations:
                generations, began_at = found, last_step(run)
            is_complete = generations[-1:] == [str(RANKS)]
            # A newcomer is killed only after it has averaged with the other rank.
            if at_steps and is_complete and last_step(run) >= max(at_steps[0], began_at + 2 * SYNC_EVERY):
                members = psutil.Process(job.pid).children()
                os.kill(generator.choice(members).pid, signal.SIGKILL)
                at_steps.pop(0)
            time.sleep(0.05)
    finally:
        job.kill()
    if job.returncode != 0 or at_steps:
        sys.exit(f"{' '.join(line)} ended with {job.returncode}, {len(at_steps)} kills left:\n{output.read_text()}")
    summary = json.loads((run / "summary.json").read_text())
    return {"loss": summary["eval"]["loss"], "lost_steps": summary.get("lost_steps", 0), "samples": summary["samples"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="from 2 to 10")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for way in arguments.ways:
            options, kills = WAYS[way]
            found[way] = []
            for seed in range(arguments.seeds):
                place = Path(folder, f"{way}-{seed}".replace(" ", ""))
                place.mkdir()
                found[way].append(train(options, kills, seed, place))
            losses = [each["loss"] for each in found[way]]
            lost = statistics.mean(each["lost_steps"] for each in found[way])
            sync = [each["loss"] for each in found.get("sync", found[way])]
            print(f"{way}: {cell(losses, sync)}; {lost:.1f} steps of ranks were lost", flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
