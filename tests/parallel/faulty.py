"""``python -m hvdtrain`` with a fault: started by a launcher on every rank, as the command line is.

The first argument is a JSON object: ``ranks`` and ``step`` say where the fault strikes, ``fault`` which one,
``after`` that it strikes after that step and not before it, ``mark`` names a file in which the moment is noted,
``made`` a folder in which each rank notes at the end how many steps it has made. The other arguments are the
command line's.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain import process

process.import_tensorflow()

from hvdtrain import files  # noqa: E402
from hvdtrain.checkpoint import folders  # noqa: E402
from hvdtrain.cli import main  # noqa: E402
from hvdtrain.data import feed  # noqa: E402
from hvdtrain.steps import CompiledSteps  # noqa: E402

SPEC = json.loads(sys.argv[1])
RANK = process.find_launcher().rank
train, sync, training_dataset = CompiledSteps.train, files.sync, feed.training_dataset


def note() -> None:
    Path(SPEC["mark"]).write_text(str(time.time()))


def strike(steps: CompiledSteps) -> None:
    fault = SPEC["fault"]
    if fault == "exception":
        raise ValueError("the step is cursed")
    if fault == "weight":
        variable = steps._model.trainable_variables[0]
        variable.assign(variable + 1e-3)
    elif fault == "nan":
        variable = steps._model.trainable_variables[SPEC["variable"]]
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


def train_with_fault(steps: CompiledSteps, *arguments) -> None:
    train_with_fault.made = getattr(train_with_fault, "made", steps.steps_made)
    is_hit = RANK in SPEC["ranks"] and train_with_fault.made == SPEC["step"]
    if is_hit and not SPEC.get("after"):
        note()
        strike(steps)
    if train_with_fault.made == SPEC.get("mend_step") and RANK == 0:
        Path(SPEC["filler"]).unlink()
    train(steps, *arguments)
    if is_hit and SPEC.get("after"):
        note()
        strike(steps)
    train_with_fault.made += 1
    time.sleep(SPEC.get("step_s", 0))


def slow_input(*arguments, **options):
    """One batch is long in coming."""
    import tensorflow as tf

    def wait(number: int) -> int:
        if RANK in SPEC["ranks"] and number == SPEC["step"]:
            note()
            time.sleep(SPEC["input_s"])
        return number

    def waited_for(number: tf.Tensor, batch: tuple) -> tuple:
        with tf.control_dependencies([tf.numpy_function(wait, [number], tf.int64)]):
            return tf.nest.map_structure(tf.identity, batch)

    return training_dataset(*arguments, **options).enumerate().map(waited_for)


def slow_sync(path: Path) -> None:
    """A disk that takes its time, for the checkpoint of a job that was asked to stop."""
    if "checkpoints" in path.parts:
        note()
        time.sleep(SPEC["sync_s"])
    sync(path)


def sync_and_die(path: Path) -> None:
    if path.name == f"step-{SPEC['step']:08d}" or f"step-{SPEC['step']:08d}.writing" in str(path):
        note()
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)


if SPEC["fault"] == "die in a save":
    files.sync = folders.sync = sync_and_die
elif SPEC["fault"] == "slow input":
    feed.training_dataset = slow_input
else:
    CompiledSteps.train = train_with_fault
    if "sync_s" in SPEC:
        files.sync = folders.sync = slow_sync
code = main(sys.argv[2:])
if "made" in SPEC:
    Path(SPEC["made"], f"rank{RANK}").write_text(str(train_with_fault.made))
sys.exit(code)
