"""Runs ``python -m hvdtrain`` with an injected fault; a launcher starts it on all ranks.

The first argument is a JSON object: ``fault`` is injected on ``ranks`` before ``step``, or after it if ``after`` is
set, and if ``checkpoint`` is set, not before a folder matches this pattern. ``mark`` is a file to which the time of the
fault is written, ``made`` a folder to which each rank writes its number of completed steps at the end. ``--balance``
takes ranks to have made ``speeds`` samples per second, instead of measuring them. The other arguments are those of the
command line.
"""

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain.system import environment, tensorflow_start

tensorflow_start.import_tensorflow()

from hvdtrain.commands.cli import main  # noqa: E402
from hvdtrain.data import feeds  # noqa: E402
from hvdtrain.system import atomic_files  # noqa: E402
from hvdtrain.training.load_balancing import LoadBalancer  # noqa: E402
from hvdtrain.training.strategies.quorum import QuorumStrategy  # noqa: E402
from hvdtrain.training.train_step import TrainStep  # noqa: E402

SPEC = json.loads(sys.argv[1])
RANK = environment.launcher().rank
run, sync, dataset_of_draws = TrainStep.run, atomic_files.sync, feeds.dataset_of_draws
run_quorum, balance = QuorumStrategy.run, LoadBalancer.rebalance


def mark_time() -> None:
    Path(SPEC["mark"]).write_text(str(time.time()))


def inject(train_step: TrainStep) -> None:
    fault = SPEC["fault"]
    while "checkpoint" in SPEC and not glob.glob(SPEC["checkpoint"]):
        time.sleep(0.01)  # it is being written in the background
    mark_time()
    if fault == "exception":
        raise ValueError("the step is cursed")
    if fault == "weight":
        variable = train_step.model.trainable_variables[0]
        variable.assign(variable + 1e-3)
    elif fault == "nan":
        variable = train_step.model.trainable_variables[SPEC["variable"]]
        variable.assign(variable * float("nan"))
    elif fault == "fill":
        with contextlib.suppress(OSError), open(SPEC["filler"], "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    elif fault == "read-only":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", SPEC["place"]], check=True)
    elif fault == "hang":
        time.sleep(1000)
    else:
        os.kill(os.getpid(), getattr(signal, fault))


def run_with_fault(train_step: TrainStep, steps: int) -> None:
    run_with_fault.completed = getattr(run_with_fault, "completed", train_step.steps_made)
    is_faulty = RANK in SPEC["ranks"] and run_with_fault.completed == SPEC["step"]
    if is_faulty and not SPEC.get("after"):
        inject(train_step)
    if run_with_fault.completed == SPEC.get("free_step") and RANK == 0:
        Path(SPEC["filler"]).unlink()
    run(train_step, steps)
    if is_faulty and SPEC.get("after"):
        inject(train_step)
    run_with_fault.completed += steps
    time.sleep(SPEC.get("step_s", 0))


def run_quorum_with_fault(strategy: QuorumStrategy, max_steps: int) -> None:
    if RANK in SPEC["ranks"] and strategy.progress.step == SPEC["step"]:
        inject(strategy.train_step)
    run_quorum(strategy, max_steps)


def balance_by_speeds(balancer: LoadBalancer) -> None:
    """Measured times would differ between runs."""
    seconds = [size / speed for size, speed in zip(balancer.rank_batch_sizes, SPEC["speeds"], strict=True)]
    balancer.times.all_steps[-1][:, :, 1] = np.array(seconds)[:, None]
    balance(balancer)


def slow_input(*arguments, **options):
    """Delays one batch."""
    import tensorflow as tf

    def wait(number: int) -> int:
        if RANK in SPEC["ranks"] and number == SPEC["step"]:
            mark_time()
            time.sleep(SPEC["input_s"])
        return number

    def after_waiting(number: tf.Tensor, batch: tuple) -> tuple:
        with tf.control_dependencies([tf.numpy_function(wait, [number], tf.int64)]):
            return tf.nest.map_structure(tf.identity, batch)

    return dataset_of_draws(*arguments, **options).enumerate().map(after_waiting)


def slow_sync(path: Path) -> None:
    """Delays the checkpoint of a job that stops, as a slow disk does."""
    if "checkpoints" in path.parts:
        mark_time()
        time.sleep(SPEC["sync_s"])
    sync(path)


def sync_and_kill(path: Path) -> None:
    if path.name == f"step-{SPEC['step']:08d}" or f"step-{SPEC['step']:08d}.writing" in str(path):
        mark_time()
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)


if SPEC["fault"] == "kill in a save":
    atomic_files.sync = sync_and_kill
elif SPEC["fault"] == "slow input":
    feeds.dataset_of_draws = slow_input
else:
    TrainStep.run = run_with_fault
    QuorumStrategy.run = run_quorum_with_fault
    if "sync_s" in SPEC:
        atomic_files.sync = slow_sync
if "speeds" in SPEC:
    LoadBalancer.rebalance = balance_by_speeds
code = main(sys.argv[2:])
if "made" in SPEC:
    Path(SPEC["made"], f"rank{RANK}").write_text(str(run_with_fault.completed))
sys.exit(code)
