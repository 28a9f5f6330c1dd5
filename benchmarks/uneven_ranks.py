"""Throughput where one of four ranks takes twice as long: sync, local and wait-free; and where it is stopped.

    launch/run mpirun -np 4 python benchmarks/uneven_ranks.py
    launch/run horovodrun --gloo -np 4 python benchmarks/uneven_ranks.py

Each step takes a declared time on every rank, twice as long on the last one: what is left of it is waited for. Prints
the samples per second of all ranks together, over that of sync training in the same turn, within one epoch: at its end,
and to evaluate, ranks meet in every mode. Then stops the last rank for ten seconds and prints
how many steps the others make in each second meanwhile. The last results are kept in
``benchmarks/results/uneven_ranks-*.json``, and drawn by ``benchmarks/local_figure.py``.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdtrain import LocalTraining, runtime
from hvdtrain.data import Arrays
from hvdtrain.tasks import load_task

STEP_S, EVERY = 0.1, 8
EPOCH = 10  # times the digits: longer than a run
WAYS = {
    "sync": None,
    "local": LocalTraining(every=EVERY),
    "overlap": LocalTraining(every=EVERY, overlap=True),
    "wait-free": LocalTraining(every=EVERY, wait_free=True),
}


class Delay(layers.Layer):
    """Waits until a step has taken its time, as a slower processor would have to be waited for."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds
        self.step_ends_s: list[float] = []
        self.at_step = {}

    def _wait(self, x: np.ndarray) -> np.ndarray:
        if self.step_ends_s:
            time.sleep(max(0.0, self.step_ends_s[-1] + self._seconds - time.time()))
        self.step_ends_s.append(time.time())
        self.at_step.pop(len(self.step_ends_s), lambda: None)()
        return x

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return inputs
        return tf.ensure_shape(tf.numpy_function(self._wait, [inputs], tf.float32), inputs.shape)


class Curve(keras.callbacks.Callback):
    """The loss of all ranks now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[list[float]] = []

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self.points.append([time.time(), (logs or {})["loss"]])


def train(way: str, steps: int, *, eval_every: int, at_step: dict[int, Any] | None = None) -> dict[str, Any]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    is_slow = topology.rank == topology.size - 1
    delay = Delay((2 if is_slow else 1) * STEP_S)
    delay.at_step = dict(at_step or {})
    task = load_task("digits")
    data = task.read_data(None)
    inner = task.make_model(data)
    model = keras.Sequential([layers.Input(inner.input_shape[1:]), delay, *inner.layers])
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=task.make_loss())
    samples = data.training.evaluation_batches(data.training.num_samples, 0, 1, 0, frozenset())
    x, y = next(iter(samples))
    repeated = Arrays(np.tile(x, (EPOCH, 1, 1, 1)), np.tile(y, EPOCH))
    curve = Curve()
    trainer = hvdtrain.Trainer(
        model,
        repeated,
        data.evaluation,
        batch_size=32,
        steps=steps,
        log_every=steps,
        eval_every=eval_every,
        check_every=0,
        callbacks=[curve],
        local=WAYS[way],
    )
    summary = trainer.fit()
    # The first steps compile: from the end of the tenth on.
    ends_s = delay.step_ends_s
    made = len(ends_s) - 10
    return {
        "samples_per_s": 32 * made / (ends_s[-1] - ends_s[9]),
        "step_ends_s": ends_s,
        "curve": [[moment - ends_s[0], loss] for moment, loss in curve.points],
        "steps": summary["steps"],
    }


def in_all(mine: float) -> float:
    return sum(runtime.current().collectives.allgather(mine))


def stopped_for_ten_seconds() -> list[int]:
    """Steps that rank 0 makes in each second while the last rank is stopped."""
    is_slow = topology.rank == topology.size - 1
    moments: list[float] = []

    def stop() -> None:
        moments.append(time.time())
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    run = train("wait-free", 250, eval_every=250, at_step={30: stop} if is_slow else {})
    began_s = max(each[0] if each else 0.0 for each in runtime.current().collectives.allgather(moments))
    return [sum(began_s + i <= each < began_s + i + 1 for each in run["step_ends_s"]) for i in range(10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeats):
        for way in WAYS:
            rates[way].append(in_all(train(way, arguments.steps, eval_every=arguments.steps)["samples_per_s"]))
    # Apart, for ranks meet to evaluate, and at the end of each epoch.
    runs = {way: [{"curve": train(way, arguments.steps, eval_every=10)["curve"]}] for way in WAYS}
    counts = stopped_for_ten_seconds()
    if topology.rank != 0:
        return
    for way, values in rates.items():
        ratios = [value / sync for value, sync in zip(values, rates["sync"], strict=True)]
        print(
            f"{topology.launcher}, {way}: {statistics.median(values):.0f} samples/s, {statistics.median(ratios):.2f} "
            f"times sync ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"steps of rank 0 in each second while the last rank is stopped: {counts}")
    name = "gloo" if "gloo" in topology.launcher else "mpi"
    path = Path(__file__).parent / "results" / f"uneven_ranks-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rates": rates, "runs": runs, "stopped": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
