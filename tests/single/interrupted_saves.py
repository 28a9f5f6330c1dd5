"""Started by test_interrupted_save.py: a save is killed before each system call that it makes on files, in turn.

Prints a JSON object. TensorFlow must be loaded and unused here: each save is a fork of this process.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from system_calls import run_killed_before, watched_part

from hvdtrain import process

process.import_tensorflow()

import keras  # noqa: E402

from hvdtrain.checkpoint import Checkpointer, folders  # noqa: E402
from hvdtrain.collectives import OneProcess  # noqa: E402


def make() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def save_twice(folder: Path) -> None:
    model = make()
    checkpointer = Checkpointer(folder, model, keep=1, collectives=OneProcess())
    model.layers[0].bias.assign([1.0, 1.0])
    checkpointer.save(1, wait=True)
    model.layers[0].bias.assign([2.0, 2.0])
    with watched_part():
        checkpointer.save(2, wait=True)


def found(folder: Path) -> list[float]:
    """The bias in each checkpoint that a reader sees; the first element in place of both where they are mixed up."""
    result = []
    for each in folders.checkpoints_in(folder):
        assert folders.damage(each) is None, (each, folders.damage(each))
        manifest, tensors = folders.read(each)
        bias = next(value for name, value in tensors.items() if name.startswith("model/") and name.endswith("/bias"))
        assert list(bias) == [manifest["step"]] * 2, (each, bias)
        result.append(manifest["step"])
    return result


def main() -> None:
    root = Path(sys.argv[1])
    names: list[str] = []
    outcomes: dict[str, int] = {}
    number = 0
    while True:
        number += 1
        folder = root / f"{number:04d}"
        names = run_killed_before(lambda folder=folder: save_twice(folder), number)
        if len(names) < number:
            break
        steps = found(folder)
        assert steps in ([1], [1, 2], [2]), (number, names[-1], steps)
        outcomes[str(steps)] = outcomes.get(str(steps), 0) + 1
    assert found(folder) == [2], "the last one was not interrupted"
    # What an interrupted save leaves does not stand in the next one's way, and goes with it.
    for folder in sorted(root.iterdir()):
        if os.listdir(folder):
            Checkpointer(folder, make(), keep=1, collectives=OneProcess()).save(3, wait=True)
            assert os.listdir(folder) == [folders.folder_name(3)], os.listdir(folder)
        shutil.rmtree(folder)
    print(json.dumps({"points": number - 1, "calls": names, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
