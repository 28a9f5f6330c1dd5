"""Elastic jobs: processes die, leave, join and stand still, and the run stays that of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elastic_runs import GLOBAL_BATCH, TRAIN, assert_equal_runs, summary, train_alone
from launcher import ROOT, TESTS, Finished, Job

pytestmark = pytest.mark.slow

STEPS = 900


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The run that all others must equal."""
    return train_alone(tmp_path_factory.mktemp("one") / "run", STEPS)


class ElasticJob(Job):
    """A job of up to three ranks, with what happens in it."""

    def __init__(self, members: str, folder: Path, events, *options: str, elastic=(), steps: int = STEPS):
        folder.mkdir(exist_ok=True)
        (folder / "events.json").write_text(json.dumps(events))
        self.folder = folder
        os.environ["HVDTRAIN_TEST_EVENTS"] = str(folder / "events.json")
        os.environ["HVDTRAIN_TEST_STEP_S"] = "0.01"
        try:
            command = [sys.executable, "-m", "hvdtrain", "elastic", members, *elastic]
            train = [*TRAIN, "--run-dir", str(folder / "run"), "--steps", str(steps), *options]
            super().__init__([*command, *train], ranks=0, launcher="")
        finally:
            del os.environ["HVDTRAIN_TEST_EVENTS"], os.environ["HVDTRAIN_TEST_STEP_S"]

    def happened(self) -> int:
        return len(list(self.folder.glob("events.json.*")))


def end(job: Job, timeout_s: float = 120) -> Finished:
    try:
        ended = job.end(timeout_s)
        assert job.processes() == {}
        return ended
    finally:
        job.kill()


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
    assert_equal_runs(tmp_path / "run", one_process)
    # The newest writer has continued the files of those before.
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if line["event"] == "train"]
    assert set(logged) == set(range(10, STEPS + 1, 10))
    assert lines[-1]["event"] == "end"
    found = summary(tmp_path / "run")
    changes = found["membership_changes"]
    assert changes[0]["ranks"] == 2
    assert [change["step"] for change in changes] == sorted(change["step"] for change in changes)
    assert sum(change["pause_seconds"] for change in changes) == pytest.approx(found["membership_seconds"])
    logged = [line for line in lines if line["event"] == "members"]
    assert [(line["step"], line["ranks"]) for line in logged] == [(each["step"], each["ranks"]) for each in changes]
    seen = (tmp_path / "changes.txt").read_text().split()
    assert {int(size) for size in seen} == {each["ranks"] for each in changes}
    assert 0 < found["membership_seconds"] < found["wall_seconds"]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert checkpoints[-1] == f"step-{STEPS:08d}"


def test_ranks_that_are_lost_while_the_others_connect_and_settle(one_process, tmp_path):
    events = [
        [60, 2, "SIGKILL", "before"],
        [1, 1, "SIGKILL", "connect"],  # of the two that are left
        [1, 1, "SIGKILL", "settle"],  # the first newcomer
    ]
    job = ElasticJob("1:3", tmp_path, events)
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3
    assert ended.output.count("hvdtrain elastic: lost rank") == 3
    assert "terminate called" not in ended.output
    assert_equal_runs(tmp_path / "run", one_process)


def test_ranks_that_are_lost_before_the_first_step_and_after_the_last(tmp_path):
    events = [[1, 1, "SIGKILL", "build"], [1, 0, "SIGKILL", "end"]]
    job = ElasticJob("2:2", tmp_path, events, "--batch-size", str(GLOBAL_BATCH // 2), steps=60)
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 2
    assert ended.output.count("before the first step or after the last: all start again") == 2
    assert_equal_runs(tmp_path / "run", train_alone(tmp_path / "one", 60))


@pytest.mark.long
def test_two_ranks_lost_at_once_and_too_few_ranks(one_process, tmp_path):
    events = [[100, 1, "SIGKILL", "within"], [100, 2, "SIGKILL", "within"]]
    job = ElasticJob("2:3", tmp_path, events, elastic=["--timeout", "0.5"])
    ended = end(job)
    assert ended.code == 75, ended.output
    assert job.happened() == 2
    assert "stopped at step" in ended.output
    # One process finishes it.
    train_alone(tmp_path / "run", STEPS)
    assert 99 <= summary(tmp_path / "run")["resumed_from"] <= 101
    assert_equal_runs(tmp_path / "run", one_process)


def test_a_stopped_rank_strangers_and_a_stop(one_process, tmp_path):
    job = ElasticJob("1:2", tmp_path, [[60, 1, "SIGSTOP", "within"]], "--stall-timeout", "3")
    try:
        job.wait_for("generation 1: 2 rank(s)")
        (port,) = [int(line.rpartition(":")[2]) for line in job.output.splitlines() if "others join at" in line]
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
        assert "no heartbeat for 3 s" in job.output
        job.wait_for("2 rank(s), 1 of them new")
        job.signal(signal.SIGTERM)
        ended = end(job)
    finally:
        job.kill()
    assert ended.code == 75, ended.output
    assert "SIGTERM to hvdtrain elastic" in ended.output
    # The global batch is that of two ranks.
    train_alone(tmp_path / "run", STEPS, batch_size=32)
    assert summary(tmp_path / "run")["resumed_from"] > 60


def test_a_loop_of_ones_own_continues(tmp_path):
    """The same program in one process, and in a job with losses and a rank that leaves."""
    program = [sys.executable, str(TESTS / "elastic_loop.py")]
    (tmp_path / "one").mkdir()
    subprocess.run([*program, str(tmp_path / "one")], cwd=ROOT, timeout=120, check=True)
    (tmp_path / "ours").mkdir()
    elastic = [sys.executable, "-m", "hvdtrain", "elastic"]
    events = ["20:1:SIGKILL", "100:0:SIGKILL", "200:1:SIGTERM"]
    job = Job([*elastic, "1:2", *program, str(tmp_path / "ours"), *events], ranks=0, launcher="")
    ended = end(job)
    assert ended.code == 0, ended.output
    assert ended.output.count("hvdtrain elastic: lost rank") == 2
    assert "leaves: SIGTERM on host" in ended.output
    with np.load(tmp_path / "one" / "weights.npz") as one, np.load(tmp_path / "ours" / "weights.npz") as ours:
        assert one.files == ours.files
        for name in one.files:
            assert np.allclose(ours[name], one[name], rtol=1e-10, atol=1e-12)
        assert (ours["used"] == 30).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["-c", "import hvdtrain; hvdtrain.init()"],
            "elastic jobs train with python -m hvdtrain, or a program that calls hvdtrain.elastic.init()",
        ),
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
