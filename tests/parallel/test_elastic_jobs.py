"""Elastic jobs: processes die, leave, join and stand still, and the run stays that of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launcher import LONG, ROOT, TESTS, Finished, Job

from hvdtrain.data.sample_plan import SamplePlan, split_batch

pytestmark = pytest.mark.slow

TASK = str(TESTS / "elastic_task.py")
TRAIN = [sys.executable, "-m", "hvdtrain", "--task", TASK]
GLOBAL_BATCH, STEPS = 48, 900


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The run that all others must equal."""
    folder = tmp_path_factory.mktemp("one") / "run"
    line = [*TRAIN, "--batch-size", str(GLOBAL_BATCH), "--steps", str(STEPS), "--run-dir", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class ElasticJob(Job):
    """A job of up to three ranks, with what happens in it."""

    def __init__(self, members: str, folder: Path, events, *options: str, elastic=()):
        folder.mkdir(exist_ok=True)
        (folder / "events.json").write_text(json.dumps(events))
        self.folder = folder
        os.environ["HVDTRAIN_TEST_EVENTS"] = str(folder / "events.json")
        os.environ["HVDTRAIN_TEST_STEP_S"] = "0.01"
        try:
            command = [sys.executable, "-m", "hvdtrain", "elastic", members, *elastic]
            train = [*TRAIN, "--run-dir", str(folder / "run"), "--steps", str(STEPS), *options]
            super().__init__([*command, *train], ranks=0, launcher="")
        finally:
            del os.environ["HVDTRAIN_TEST_EVENTS"], os.environ["HVDTRAIN_TEST_STEP_S"]

    @property
    def text(self) -> str:
        return "".join(self._output)

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        until = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < until, f"never said {text!r}:\n{self.text}"
            assert self.is_running, self.text
            time.sleep(0.05)

    def happened(self) -> int:
        return len(list(self.folder.glob("events.json.*")))


def end(job: ElasticJob, timeout_s: float = 120) -> Finished:
    try:
        ended = job.end(timeout_s)
        assert job.processes() == {}
        return ended
    finally:
        job.kill()


def weights(folder: Path) -> list[np.ndarray]:
    import keras

    return keras.saving.load_model(folder / "model.keras", compile=False).get_weights()


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def relative_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(np.abs(a - b).max() / max(1e-12, np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def assert_equals_one_process(folder: Path, one: Path) -> None:
    assert relative_difference(weights(folder), weights(one)) < 1e-10
    for name in ("steps", "samples"):
        assert summary(folder)[name] == summary(one)[name]
    assert summary(folder)["eval"] == pytest.approx(summary(one)["eval"], rel=1e-6)


@pytest.fixture(autouse=True, scope="module")
def _task_can_be_imported():
    sys.path.insert(0, str(TESTS))
    import elastic_task  # its layer is in the saved models

    yield elastic_task
    sys.path.remove(str(TESTS))
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def test_ranks_that_are_lost_leave_and_return_change_no_update(one_process, tmp_path):
    events = [
        [30, 0, "SIGKILL", "before"],  # rank 0, which writes
        [60, 1, "SIGKILL", "within"],  # in a step that no rank can complete
        [500, 1, "SIGTERM", "before"],  # leaves, and does not return
        [700, 0, "SIGKILL", "within"],
    ]
    job = ElasticJob("1:3", tmp_path, events, "--checkpoint-every", "100")
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 4
    assert ended.output.count("hvdtrain elastic: lost rank") == 3
    assert "leaves: SIGTERM on host" in ended.output
    assert_equals_one_process(tmp_path / "run", one_process)
    # The newest writer has continued the files of those before.
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if line["event"] == "train"]
    assert set(logged) == set(range(10, STEPS + 1, 10))
    assert lines[-1]["event"] == "end"
    found = summary(tmp_path / "run")
    assert found["membership_changes"] >= 3
    assert 0 < found["membership_seconds"] < found["wall_seconds"]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert checkpoints[-1] == f"step-{STEPS:08d}"


ACCUMULATION = ["--gradient-accumulation-steps", "3", "--global-batch-size", "16", "--shares", "2,1,1"]
UPDATE = ["--optimizer", "adamw", "--weight-decay", "0.01", "--ema", "0.9", "--clip-norm", "0.5"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([*ACCUMULATION, *UPDATE], id="accumulation, shares and weight decay"),
        LONG(["--sync-batchnorm", "--balance", "--balance-every", "10", *UPDATE], id="synchronized BatchNormalization"),
    ],
)
def test_modes_change_no_update(options, tmp_path, monkeypatch):
    if "--sync-batchnorm" in options:
        monkeypatch.setenv("HVDTRAIN_TEST_BATCHNORM", "1")
    steps = ["--steps", "140"]
    alone = [each for each in options if each not in ("--balance", "--balance-every", "10", "--shares", "2,1,1")]
    batch = [] if "--global-batch-size" in options else ["--batch-size", str(GLOBAL_BATCH)]
    line = [*TRAIN, *alone, *batch, *steps, "--run-dir", str(tmp_path / "one")]
    one = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert one.returncode == 0, one.stderr
    events = [[30, 0, "SIGKILL", "before"], [60, 1, "SIGKILL", "within"], [120, 1, "SIGTERM", "before"]]
    job = ElasticJob("1:3", tmp_path / "job", events, *options, *steps)
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3
    assert ended.output.count("--shares was for the ranks before") == ("--shares" in options)
    assert_equals_one_process(tmp_path / "job" / "run", tmp_path / "one")


def one_process_without(lost: set[tuple[int, int, int]], steps: int, learning_rate: float) -> list[np.ndarray]:
    """The weights after SGD on all samples except those of the lost ``(step, rank, number of ranks)``."""
    import elastic_task
    import keras

    keras.utils.set_random_seed(0)
    data = elastic_task.TASK.read_data(None)
    model = elastic_task.TASK.make_model(data)
    model.compile(keras.optimizers.SGD(learning_rate), elastic_task.TASK.loss())
    x, y = data.training.x, data.training.y
    for step in range(1, steps + 1):
        numbers = plan(0, 1, len(x)).numbers(step - 1)
        for at, rank, size in lost:
            if at == step:
                numbers = np.setdiff1d(numbers, plan(rank, size, len(x)).numbers(step - 1))
        model.train_on_batch(x[numbers], y[numbers])
    return model.get_weights()


def plan(rank: int, size: int, num_samples: int) -> SamplePlan:
    sizes = split_batch(GLOBAL_BATCH, [1] * size, GLOBAL_BATCH)
    return SamplePlan(num_samples=num_samples, batch_size=1, rank=rank, size=size, rank_batch_sizes=sizes)


def test_local_sgd_loses_only_what_lost_ranks_did_not_average(tmp_path):
    """With an average after each step, plain SGD equals one process without the samples of lost ranks' last steps."""
    events = [[40, 2, "SIGKILL", "within"], [60, 0, "SIGKILL", "within"], [120, 1, "SIGTERM", "before"]]
    options = ["--mode", "local", "--sync-every", "1", "--optimizer", "sgd", "--learning-rate", "0.1", "--steps", "130"]
    job = ElasticJob("1:3", tmp_path, events, *options, "--checkpoint-every", "50")
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3
    lines = [line for line in ended.output.splitlines() if "local step(s) of 1 rank(s)" in line]
    found = summary(tmp_path / "run")
    # A rank is lost in a step that the others may complete without it, or not have begun.
    assert found["lost_steps"] == len(lines) <= 2
    happened = [(tmp_path / f"events.json.{i}").read_text().split()[1] for i in (0, 1)]
    lost = [(at, rank, int(size)) for (at, rank, *_), size in zip(events, happened, strict=False)]
    expected = one_process_without({each for each in lost if f"before step {each[0] + 1}:" in ended.output}, 130, 0.1)
    ours = weights(tmp_path / "run")
    assert relative_difference(ours, expected) < 1e-10
    assert found["steps"] == 130


@pytest.mark.long
def test_local_sgd_loses_nothing_of_ranks_that_leave(tmp_path):
    events = [[30, 1, "SIGTERM", "before"], [61, 0, "SIGTERM", "before"]]
    job = ElasticJob("1:3", tmp_path, events, "--mode", "local", "--sync-every", "8", "--steps", "100")
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 2
    found = summary(tmp_path / "run")
    assert found["lost_steps"] == 0
    # Three rounds before each of them leaves, with a shorter one then; five after that, the last of them shorter.
    assert found["averaging_rounds"] in (13, 14, 15)
    assert found["samples"] == 3 * 1437 + 10 * GLOBAL_BATCH


@pytest.mark.long
def test_two_ranks_lost_at_once_and_too_few_ranks(one_process, tmp_path):
    events = [[100, 1, "SIGKILL", "within"], [100, 2, "SIGKILL", "within"]]
    job = ElasticJob("2:3", tmp_path, events, elastic=["--timeout", "0.5"])
    ended = end(job)
    assert ended.code == 75, ended.output
    assert job.happened() == 2
    assert "stopped at step" in ended.output
    # One process finishes it.
    line = [*TRAIN, "--batch-size", str(GLOBAL_BATCH), "--steps", str(STEPS), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 99 <= summary(tmp_path / "run")["resumed_from"] <= 101
    assert_equals_one_process(tmp_path / "run", one_process)


def test_a_stopped_rank_strangers_and_a_stop(one_process, tmp_path):
    job = ElasticJob("1:2", tmp_path, [[60, 1, "SIGSTOP", "within"]], "--stall-timeout", "3")
    try:
        job.wait_for("generation 1: 2 rank(s)")
        (port,) = [int(line.rpartition(":")[2]) for line in job.text.splitlines() if "others join at" in line]
        # Strangers: one without the token, one that says nothing, one with other options.
        with socket.create_connection(("127.0.0.1", port)) as stranger, socket.create_connection(("127.0.0.1", port)):
            stranger.sendall(b'{"kind": "hello", "token": "\xc3\x28", "host": 1}\n{"kind": "end", "code": 9}\n')
            assert stranger.recv(10) == b""
            member = next(
                environment for environment in job.processes().values() if "HVDTRAIN_ELASTIC_TOKEN" in environment
            )
            line = [*TRAIN, "--run-dir", str(tmp_path / "run"), "--steps", "7", "--join", f"127.0.0.1:{port}"]
            env = {**os.environ, "HVDTRAIN_ELASTIC_TOKEN": member["HVDTRAIN_ELASTIC_TOKEN"]}
            other = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert other.returncode == 78, other.stderr
        assert (
            "must have the options and versions of the job. Received: --stall-timeout: 600.0, not 3.0" in other.stderr
        )
        job.wait_for("lost rank 1")
        assert "no heartbeat for 3 s" in job.text
        job.wait_for("2 rank(s), 1 of them new")
        job.signal(signal.SIGTERM)
        ended = end(job)
    finally:
        job.kill()
    assert ended.code == 75, ended.output
    assert "SIGTERM to hvdtrain elastic" in ended.output
    # The global batch is that of two ranks.
    line = [*TRAIN, "--batch-size", "32", "--steps", str(STEPS), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["resumed_from"] > 60


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["-c", "import hvdtrain; hvdtrain.init()"], "elastic jobs train with python -m hvdtrain"),
        (["-m", "hvdtrain", "eval", "--task", "digits"], "elastic jobs train. Received: another command"),
        (["-m", "hvdtrain", "--join", "nowhere"], "--join must be HOST:PORT. Received: 'nowhere'"),
    ],
)
def test_what_cannot_be_elastic_is_refused(line, message, tmp_path):
    env = {**os.environ, "HVDTRAIN_ELASTIC": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, *line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (1, 64)
    assert message in done.stderr
