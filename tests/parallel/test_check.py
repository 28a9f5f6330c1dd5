"""``hvdtrain check``: compares the first steps of a program with those of one process, and ends it."""

import subprocess
import sys

import pytest
from launcher import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import hvdtrain

hvdtrain.init(seed=1)
import keras
import numpy as np

x = np.random.RandomState(0).normal(size=(128, 4)).astype("float32")
x, y = hvdtrain.shard(x, x[:, :1])
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), LOSS)
hvdtrain.broadcast(model)
model.fit(x, y, batch_size=8, epochs=9, verbose=0)
print("after all epochs")
"""


def check(folder, loss: str, *changes: tuple[str, str]) -> subprocess.CompletedProcess:
    program = folder / "train.py"
    text = PROGRAM.replace("LOSS", loss)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    program.write_text(text)
    command = [sys.executable, "-m", "hvdtrain", "check", "--np", "2", str(program)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)


def test_a_program_that_is_equal(tmp_path):
    done = check(tmp_path, "'mse'")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("is that of one process. Compared: 4 gradients, 14 variables, 1 metrics") == 3
    assert "after all epochs" not in done.stdout


def test_a_program_that_is_not(tmp_path):
    done = check(tmp_path, "lambda y, p: keras.ops.mean((y - p + keras.ops.mean(p)) ** 2, -1)")
    assert done.returncode != 0
    assert "Received: loss 'lambda', whose mean over ranks differs" in done.stderr


@pytest.mark.long
def test_a_program_of_which_nothing_is_compared(tmp_path):
    """It ends, as others do."""
    done = check(tmp_path, "'mse'", ("optimizers.Adam())", "optimizers.Adam(), op='adasum')"))
    assert done.returncode != 0
    assert "the training step cannot be compared with that of one process: op='adasum' makes other" in done.stderr
    assert "after all epochs" not in done.stdout
