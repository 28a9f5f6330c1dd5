"""hvdtrain.run with real ranks: results, errors, and what is sent."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from doc_blocks import blocks

import hvdtrain
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.processes import is_running


class StrangeError(Exception):
    """Cannot be unpickled: its constructor takes other arguments than its args."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def own_rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "-1")))


@pytest.mark.slow
def test_results_of_a_closure_that_reduces_and_no_tensorflow_in_the_parent():
    code = """
import sys
import hvdtrain
offset = 10
def mean(x, *, scale):
    import numpy as np
    topology = hvdtrain.init()
    from hvdtrain.distributed import runtime
    print(f"printed by rank {topology.rank}", flush=True)
    (total,) = runtime.current().collectives.sum([np.array([x + topology.rank], np.float32)])
    return topology.rank, scale * float(total[0]) + offset
print(hvdtrain.run(mean, np=2, args=(1,), kwargs={"scale": 2}))
print([name for name in ("tensorflow", "keras", "horovod") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *printed, results, loaded = done.stdout.splitlines()
    assert (results, loaded) == ("[(0, 16.0), (1, 16.0)]", "[]")
    assert sorted(printed) == ["printed by rank 0", "rank 1: printed by rank 1"]


@pytest.mark.parametrize("controller", ["mpi", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_error_of_the_rank_that_fails_first_ends_the_others(controller, capfd):
    def fail():
        if own_rank() == 1:
            raise LookupError("nothing there")
        time.sleep(600)  # As in a collective that rank 1 never joins.

    with pytest.raises(LookupError, match="nothing there") as caught:
        hvdtrain.run(fail, np=2, controller=controller, timeout_s=60)
    text = str(caught.value.__cause__)
    assert "rank 1 of 2:\nTraceback (most recent call last):" in text
    assert 'raise LookupError("nothing there")' in text
    assert "function_rank" not in text
    # The launcher's own description of the end is not shown.
    assert capfd.readouterr().out == ""


def test_sets_have_the_same_order_on_all_ranks(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    orders = hvdtrain.run(lambda: list({f"class {number}" for number in range(20)}), np=2)
    assert orders[0] == orders[1]


@pytest.mark.slow
def test_more_ranks_than_cores_and_a_lambda():
    assert hvdtrain.run(lambda: own_rank() ** 2, np=3) == [0, 1, 4]


@pytest.mark.slow
def test_errors_and_results_that_cannot_be_sent():
    def fail():
        raise StrangeError("this", "that")

    with pytest.raises(HvdtrainError, match=r"rank 0 failed: .*StrangeError: this and that"):
        hvdtrain.run(fail, np=1)
    with pytest.raises(TypeError, match="cannot pickle"):
        hvdtrain.run(lambda: threading.Lock(), np=1)
    with pytest.raises(SystemExit):
        hvdtrain.run(lambda: sys.exit(0), np=1)


@pytest.mark.slow
def test_a_trainer_prints_on_rank_0_only(capsys):
    def train():
        import keras
        import numpy as np

        hvdtrain.init(seed=1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        x = np.ones((64, 3), np.float32)
        config = hvdtrain.TrainConfig(batch_size=4, steps=20)
        return hvdtrain.Trainer(model, hvdtrain.data.Arrays(x, x[:, :1]), config).fit()["weights_sha256"]

    first, second = hvdtrain.run(train, timeout_s=120)
    assert first == second
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("rank 1: ") for line in lines), lines
    assert any(line.endswith("4 parameters, on 2 rank(s)") for line in lines)
    assert "weights: equal on all ranks" in lines


@pytest.mark.slow
def test_the_notebook_of_the_documentation_returns_a_model(tmp_path):
    (block,) = [each for each in blocks() if each.page.name == "notebooks.md" and each.title]
    (tmp_path / "notebook.py").write_text(block.text)
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "193"
    assert "done: " in done.stdout
    assert "<stdout>" not in done.stdout
    assert done.stderr == ""


INTERRUPTED = """
import hvdtrain, os, pathlib, time
def wait():
    pathlib.Path(f"{os.getpid()}.pid").touch()
    time.sleep(600)
hvdtrain.run(wait, np=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("mpi", marks=pytest.mark.long), "gloo"])
def test_an_interrupt_of_the_caller_ends_the_ranks(launcher, tmp_path):
    line = [sys.executable, "-c", INTERRUPTED.replace("np=2", f"np=2, controller='{launcher}'")]
    caller = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline_s = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert caller.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    caller.send_signal(signal.SIGINT)
    _, errors = caller.communicate(timeout=60)
    assert errors.endswith("KeyboardInterrupt\n")
    ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
    while time.monotonic() < deadline_s and any(map(is_running, ranks)):
        time.sleep(0.05)
    left = [rank for rank in ranks if is_running(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left


@pytest.mark.slow
def test_ranks_without_a_result():
    with pytest.raises(HvdtrainError, match=r"each rank must return a result\. Received: none of rank 0.*exit code 7"):
        hvdtrain.run(lambda: os._exit(7), np=1)
    with pytest.raises(HvdtrainError, match=r"the job must end within 3 s\. Received: no end\. It was ended\."):
        hvdtrain.run(lambda: time.sleep(600), np=1, timeout_s=3)


def test_arguments_that_break_a_rule(monkeypatch):
    for np in (0, True, 2.0, "auto"):
        with pytest.raises(UsageError, match=r"np must be a whole number of at least 1. Received: "):
            hvdtrain.run(print, np=np)
    with pytest.raises(UsageError, match=r"function must be callable. Received: a int"):
        hvdtrain.run(5)
    with pytest.raises(UsageError, match=r"they must be picklable. Received: TypeError: cannot pickle"):
        hvdtrain.run(print, args=(threading.Lock(),))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(UsageError, match=r"Received: a process that Open MPI started as rank 1"):
        hvdtrain.run(print)
