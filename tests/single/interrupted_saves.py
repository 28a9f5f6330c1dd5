"""Run by test_interrupted_save.py: kills a save before each of its file system calls in turn; prints a JSON object.

``python interrupted_saves.py FOLDER STEP``: the save that is killed is of this step, and follows one of step 1.

TensorFlow must be imported but not used in this process, of which each save is a fork.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from system_calls import run_killed_before, watched_part

from hvdtrain.system import tensorflow_start

tensorflow_start.import_tensorflow()

import keras  # noqa: E402

from hvdtrain.checkpoint import storage  # noqa: E402
from hvdtrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from hvdtrain.distributed.single_process import SingleProcessCollectives  # noqa: E402


def make() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def save_twice(folder: Path, second_step: int) -> None:
    model = make()
    checkpointer = Checkpointer(folder, model, keep=1, collectives=SingleProcessCollectives())
    model.layers[0].bias.assign([1.0, 1.0])
    checkpointer.save(1, wait=True)
    model.layers[0].bias.assign([2.0, 2.0])
    with watched_part():
        checkpointer.save(second_step, wait=True)


def found(folder: Path) -> list[float]:
    """Returns the biases in the checkpoints that a resumed run finds: 1 for the first save, 2 for the second."""
    storage.recover(folder)
    result = []
    for each in storage.checkpoints_in(folder):
        assert storage.damage(each) is None, (each, storage.damage(each))
        tensors = storage.read(each).tensors
        (name,) = [name for name in tensors if name.startswith("model/") and name.endswith("/bias")]
        bias = tensors[name]
        assert bias[0] == bias[1], (each, bias)
        result.append(float(bias[0]))
    return result


def main() -> None:
    root, second_step = Path(sys.argv[1]), int(sys.argv[2])
    names: list[str] = []
    outcomes: dict[str, int] = {}
    number = 0
    while True:
        number += 1
        folder = root / f"{number:04d}"
        names = run_killed_before(lambda folder=folder: save_twice(folder, second_step), number)
        if len(names) < number:
            break
        biases = found(folder)
        assert biases in ([[1], [2]] if second_step == 1 else [[1], [1, 2], [2]]), (number, names[-1], biases)
        outcomes[str(biases)] = outcomes.get(str(biases), 0) + 1
    assert found(folder) == [2], "the last save was not interrupted"
    # The next save succeeds, and deletes what an interrupted one has left.
    for folder in sorted(root.iterdir()):
        if os.listdir(folder):
            checkpointer = Checkpointer(folder, make(), keep=1, collectives=SingleProcessCollectives())
            checkpointer.restore()
            checkpointer.save(3, wait=True)
            assert os.listdir(folder) == [storage.folder_name(3)], os.listdir(folder)
        shutil.rmtree(folder)
    print(json.dumps({"points": number - 1, "calls": names, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
