"""Overhead of checkpoints for a large model, written in the background and in the foreground.

    launch/run mpirun -np 2 python benchmarks/checkpointing.py               # on 2 cores: no free core for writing
    launch/run python benchmarks/checkpointing.py --threads 1                # one free core

Trains a network of more than 100 MB with Adam, which makes checkpoints of more than 300 MB. Each repetition
makes three runs of ``--steps`` steps: without checkpoints, with checkpoints in the background, and with
training paused for each. Prints the overhead of the latter two relative to the first.
"""

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import hvdtrain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=61)
parser.add_argument("--every", type=int, default=20)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--threads", type=int, help="compute threads of a rank; default: an equal share of the cores")
arguments = parser.parse_args()
topology = hvdtrain.init(seed=0, threads=arguments.threads)
import keras
import numpy as np
from keras import layers

from hvdtrain.distributed import runtime


class Foreground(hvdtrain.Checkpointer):
    """Saves in the foreground: training waits until the checkpoint is on disk."""

    def save(self, step: int, **options) -> None:
        super().save(step, **{**options, "wait": True})


class Timer(keras.callbacks.Callback):
    """Measures from the end of the first step, which compiles, to the end of the last."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now = time.perf_counter()
        self.began_s = getattr(self, "began_s", now)
        self.ended_s = now


def large_model() -> keras.Model:
    width = 3000
    model = keras.Sequential(
        [layers.Input((width,)), *(layers.Dense(width, activation="relu") for _ in range(3)), layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss, jit_compile=False)
    return model


def run_seconds(kind: str, steps: int, every: int, folder: Path) -> float:
    # Frees the models of earlier runs.
    keras.utils.clear_session()
    gc.collect()
    model, timer = large_model(), Timer()
    kinds = {"background": hvdtrain.Checkpointer, "foreground": Foreground}
    checkpointer = kinds[kind](folder, model, keep=1) if kind in kinds else None
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, model.input_shape[1])).astype(np.float32)
    data = hvdtrain.data.Arrays(x, rng.integers(0, 10, len(x)))
    config = hvdtrain.TrainConfig(
        steps=steps,
        guards=hvdtrain.GuardConfig(check_every=0),
        checkpoint=hvdtrain.CheckpointConfig(checkpoint_every=every),
        logging=hvdtrain.LoggingConfig(log_every=steps),
    )
    hvdtrain.Trainer(model, data, config, callbacks=[timer], checkpointer=checkpointer, reporter=None).fit()
    return timer.ended_s - timer.began_s


def main() -> None:
    collectives = runtime.current().collectives
    folder = Path(collectives.allgather(tempfile.mkdtemp())[0])
    costs: dict[str, list[float]] = {"background": [], "foreground": []}
    bare: list[float] = []
    for _ in range(arguments.repeats):
        seconds = {}
        for kind in ("none", *costs):
            seconds[kind] = run_seconds(kind, arguments.steps, arguments.every, folder / kind)
            if topology.rank == 0 and kind != "none":
                shutil.rmtree(folder / kind)
        bare.append(1000 * seconds["none"] / (arguments.steps - 1))
        for kind, shares in costs.items():
            shares.append(seconds[kind] / seconds["none"] - 1)
    if topology.rank == 0:
        megabytes = sum(4 * variable.value.shape.num_elements() for variable in large_model().weights) / 1e6
        print(f"model of {megabytes:.0f} MB, {topology.size} rank(s), a checkpoint every {arguments.every} steps")
        print(f"a step without checkpoints: {statistics.median(bare):.0f} ms")
        for kind, shares in costs.items():
            spread = f"{100 * min(shares):.1f} to {100 * max(shares):.1f}"
            print(f"{kind}: {100 * statistics.median(shares):.1f} % longer ({spread} %, {len(shares)} repetitions)")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
