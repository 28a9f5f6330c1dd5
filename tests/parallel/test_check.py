"""``hvdtrain check``: compares the first steps of a program with those of one process, and ends it."""

import subprocess
import sys

import psutil
import pytest
from launcher import LONG, ROOT

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


def command_of(program) -> list[str]:
    return [sys.executable, "-m", "hvdtrain", "check", "--np", "2", str(program)]


def check(folder, loss: str, *changes: tuple[str, str]) -> subprocess.CompletedProcess:
    program = folder / "train.py"
    text = PROGRAM.replace("LOSS", loss)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    program.write_text(text)
    return subprocess.run(command_of(program), capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)


def test_a_program_that_is_equal(tmp_path):
    done = check(tmp_path, "'mse'")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("is that of one process. Compared: 4 gradients, 14 variables, 1 metrics") == 3
    assert "after all epochs" not in done.stdout


def test_a_program_that_is_not(tmp_path):
    done = check(tmp_path, "lambda y, p: keras.ops.mean((y - p + keras.ops.mean(p)) ** 2, -1)")
    assert done.returncode != 0
    assert "Received: loss 'lambda', whose mean over ranks differs" in done.stderr


def test_a_program_that_ends_before_a_step_was_compared(tmp_path):
    program = tmp_path / "no_training.py"
    program.write_text("print('to its end')")
    done = subprocess.run(command_of(program), capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode != 0
    assert done.stdout.count("to its end") == 2
    assert "hvdtrain check: no training step was compared. The program must call hvdtrain.init()" in done.stderr


def test_a_check_that_is_stopped_stops_its_job(tmp_path):
    program = tmp_path / "waiting.py"
    program.write_text("import time; print('begun', flush=True); time.sleep(60)")
    checking = subprocess.Popen(command_of(program), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    assert b"begun" in checking.stdout.readline()
    ranks = [each for each in psutil.Process(checking.pid).children(recursive=True) if str(program) in each.cmdline()]
    checking.terminate()
    assert checking.wait(timeout=30) != 0
    _, remaining = psutil.wait_procs(ranks, timeout=10)
    assert ranks
    assert not remaining


@pytest.mark.long
def test_a_program_of_which_nothing_is_compared(tmp_path):
    """It ends, as others do."""
    done = check(tmp_path, "'mse'", ("optimizers.Adam())", "optimizers.Adam(), op='adasum')"))
    assert done.returncode != 0
    assert "the training step cannot be compared with that of one process: op='adasum' makes other" in done.stderr
    assert "after all epochs" not in done.stdout


OWN_LOOP = """
def step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss((model(x, training=True) - y) ** 2, global_batch_size=16)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

VERIFY
tf.function(step)((x[:8], y[:8]))
"""


@pytest.mark.parametrize(
    ("verify", "is_equal", "message"),
    [
        ("", False, "it is made by a loop of the program's own. Call hvdtrain.verify(step, batch, model)"),
        LONG("hvdtrain.verify(step, (x[:8], y[:8]), model)", False, "it is divided by a constant"),
        LONG(
            "hvdtrain.verify(model.train_step, (x[:8], y[:8]), model)",
            True,
            "the step is that of one process. Compared: 4 gradients",
        ),
    ],
    ids=["without", "unequal", "equal"],
)
def test_a_loop_of_its_own(verify, is_equal, message, tmp_path):
    loop = OWN_LOOP.replace("VERIFY", verify)
    line = "model.fit(x, y, batch_size=8, epochs=9, verbose=0)"
    done = check(tmp_path, "'mse'", (line, loop), ("import keras\n", "import keras\nimport tensorflow as tf\n"))
    assert (done.returncode == 0) == is_equal, done.stderr
    assert message in done.stderr
    assert "after all epochs" not in done.stdout
