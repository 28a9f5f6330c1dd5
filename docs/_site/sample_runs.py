"""Makes the runs of the gallery again: launch/run python docs/_site/sample_runs.py

Each is a real job on this machine, in which ranks are slowed down, killed and stopped at fixed steps. The files that
a report reads are kept in docs/runs.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.runs.run_record import FILES
from hvdtrain.tasks import digits

FOLDER = Path(__file__).resolve().parents[1] / "runs"
SLOW_RANK, SLOW_FROM_STEP = 1, 700
KILLED_RANK, KILLED_AFTER_STEP, STOPPED_AFTER_STEP = 2, 900, 1800
STEPS = 2400
_STOPPED_EARLY = 75
_SLOW, _FAILS = "SAMPLE_RUN_SLOW", "SAMPLE_RUN_FAILS"
"""Variables of a job: whether a rank is slow; the folder in which it notes that it was killed and stopped."""


class SlowRank(keras.layers.Layer):
    """A slower processor: each sample takes longer on one rank, from one step on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_batches = 0

    def _wait(self, x: np.ndarray) -> np.ndarray:
        self._num_batches += 1
        if runtime.collectives().rank == SLOW_RANK and self._num_batches > SLOW_FROM_STEP:
            time.sleep(0.0006 * len(x))
        return x

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or _SLOW not in os.environ:
            return inputs
        return tf.ensure_shape(tf.numpy_function(self._wait, [inputs], inputs.dtype), inputs.shape)


class Failures(keras.callbacks.Callback):
    """Kills a rank, and later asks the job to stop, once each."""

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._step = int(self.model.optimizer.iterations.numpy())
        rank = runtime.collectives().rank
        if rank == KILLED_RANK and self._step > KILLED_AFTER_STEP and _is_first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and self._step > STOPPED_AFTER_STEP and _is_first("stopped"):
            os.kill(os.getppid(), signal.SIGTERM)


def _is_first(event: str) -> bool:
    folder = os.environ.get(_FAILS)
    if folder is None or Path(folder, event).exists():
        return False
    Path(folder, event).touch()
    return True


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    """The network of the task digits, behind a layer that can be slow."""
    network = digits.make_model(data)
    inputs = keras.layers.Input(network.input_shape[1:])
    return keras.Model(inputs, network(SlowRank()(inputs)))


TASK = hvdtrain.Task(
    model=make_model,
    data=digits.read_data,
    loss=digits.TASK.loss,
    metrics=digits.TASK.metrics,
    callbacks=lambda: [Failures()],
    defaults={"steps": STEPS, "batch_size": 32, "log_every": 20, "eval_every": 240, "checkpoint_every": 400},
)


def run(name: str, launcher: Sequence[str], *options: str, code: int = 0, **variables: str) -> None:
    """Runs a job on this task, and keeps the files that a report reads."""
    with tempfile.TemporaryDirectory() as folder:
        # A run records where its task is: not in this checkout.
        task = shutil.copy(__file__, folder)
        words = ["--task", Path(task).name, "--run-dir", name, *options]
        command = [*launcher, sys.executable, "-m", "hvdtrain", *words]
        for expected in (code, 0) if code else (0,):
            done = subprocess.run(command, cwd=folder, env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"})
            assert done.returncode == expected, f"exit code {done.returncode}, expected {expected}"
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for file in FILES:
            if (made := Path(folder, name, file)).exists():
                shutil.copy(made, FOLDER / name / file)


if __name__ == "__main__":
    horovodrun = ["horovodrun", "--gloo", "-np", "3"]
    run("slow-rank", horovodrun, **{_SLOW: "1"})
    run("slow-rank-balanced", horovodrun, "--balance", "--balance-every", "100", **{_SLOW: "1"})
    with tempfile.TemporaryDirectory() as noted:
        elastic = [sys.executable, "-m", "hvdtrain", "elastic", "2:3"]
        run("lost-rank", elastic, code=_STOPPED_EARLY, **{_FAILS: noted})
