"""Elastic jobs: processes die, leave, join and hang, and the run stays that of one process."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elastic_runs import GLOBAL_BATCH, TRAIN, assert_equal_runs, summary, train_alone
from launcher import LONG, ROOT, TESTS, Finished, Job, run_commands
from shared_averages import compared_averages

from hvdtrain.data.sample_plan import SamplePlan, split_batch

pytestmark = [pytest.mark.slow, pytest.mark.waits]

STEPS = 900
FEW_BITS = ["--sync-every", "4", "--sync-dtype", "int4"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The run that all others must equal."""
    return train_alone(tmp_path_factory.mktemp("one") / "run", STEPS)


class ElasticJob(Job):
    """A job of up to three ranks, with what happens in it."""

    def __init__(self, members: str, folder: Path, events, *options: str, elastic=(), length=("--steps", str(STEPS))):
        folder.mkdir(exist_ok=True)
        (folder / "events.json").write_text(json.dumps(events))
        self.folder = folder
        self.averages = folder / "averages"
        self.averages.mkdir()
        os.environ["HVDTRAIN_TEST_EVENTS"] = str(folder / "events.json")
        os.environ["HVDTRAIN_TEST_STEP_S"] = "0.01"
        os.environ["HVDTRAIN_TEST_AVERAGES"] = str(self.averages)
        try:
            command = [sys.executable, "-m", "hvdtrain", "elastic", members, *elastic]
            train = [*TRAIN, "--run-dir", str(folder / "run"), *length, *options]
            super().__init__([*command, *train], ranks=0, launcher="")
        finally:
            for name in ("EVENTS", "STEP_S", "AVERAGES"):
                del os.environ[f"HVDTRAIN_TEST_{name}"]

    def happened(self) -> int:
        return len(list(self.folder.glob("events.json.*")))


def end(job: Job, timeout_s: float = 120) -> Finished:
    try:
        ended = job.end(timeout_s)
        assert job.processes() == {}
        return ended
    finally:
        job.kill()


@pytest.mark.parametrize("lost", ["silent", "connects", "listens"])
def test_the_start_with_a_rank_that_never_connects_can_be_cut(lost):
    job = Job([sys.executable, str(TESTS / "elastic_start.py"), lost], ranks=0, launcher="")
    done = end(job, 60)
    assert done.code == 0, done.output
    assert "failed: Horovod initialization failed" in done.output
    assert "1 rank" in done.output


def weights_in_order(folder: Path) -> list[np.ndarray]:
    import keras

    return keras.saving.load_model(folder / "model.keras", compile=False).get_weights()


def relative_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(np.abs(a - b).max() / max(1e-12, np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def _task_can_be_imported():
    sys.path.insert(0, str(TESTS))
    import elastic_task  # its layer is in the saved models
    import keras

    # Only the first import of the task sets these.
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield elastic_task
    sys.path.remove(str(TESTS))
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
    assert job.happened() == 4, ended.output
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
    assert job.happened() == 3, ended.output
    assert ended.output.count("hvdtrain elastic: lost rank") == 3
    assert "terminate called" not in ended.output
    assert_equal_runs(tmp_path / "run", one_process)


@pytest.mark.long
@pytest.mark.parametrize("place", ["connect", "settle"])
def test_a_newcomer_that_is_told_to_stop_while_it_joins(place, one_process, tmp_path):
    job = ElasticJob("1:3", tmp_path, [[60, 2, "SIGKILL", "before"], [1, 1, "SIGTERM", place]])
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 2, ended.output
    assert ended.output.count("hvdtrain elastic: lost rank") == 1
    assert_equal_runs(tmp_path / "run", one_process)


@pytest.mark.long
def test_ranks_that_are_lost_before_the_first_step_and_after_the_last(tmp_path):
    events = [[1, 1, "SIGKILL", "build"], [1, 0, "SIGKILL", "end"]]
    job = ElasticJob("2:2", tmp_path, events, "--batch-size", str(GLOBAL_BATCH // 2), length=("--steps", "60"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 2, ended.output
    assert ended.output.count("before the first step or after the last: all start again") == 2
    assert_equal_runs(tmp_path / "run", train_alone(tmp_path / "one", 60))


@pytest.mark.long
def test_a_rank_that_is_lost_in_the_check_of_a_step(tmp_path):
    """The first step is checked when it is made: the second forward pass is that of the check."""
    job = ElasticJob("1:2", tmp_path, [[2, 1, "SIGKILL", "within"]], length=("--steps", "60"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 1, ended.output
    assert ended.output.count("hvdtrain elastic: lost rank 1") == 1
    # The global batch is that of two ranks.
    assert_equal_runs(tmp_path / "run", train_alone(tmp_path / "one", 60, batch_size=32))


ACCUMULATION = ["--gradient-accumulation-steps", "3", "--global-batch-size", "16", "--shares", "2,1,1"]
UPDATE = ["--optimizer", "adamw", "--weight-decay", "0.01", "--ema", "0.9", "--clip-norm", "0.5"]


@pytest.mark.parametrize(
    "options",
    [
        LONG([*ACCUMULATION, *UPDATE], id="accumulation, shares and weight decay"),
        LONG(["--sync-batchnorm", "--balance", "--balance-every", "10", *UPDATE], id="synchronized BatchNormalization"),
    ],
)
def test_modes_change_no_update(options, tmp_path, monkeypatch):
    if "--sync-batchnorm" in options:
        monkeypatch.setenv("HVDTRAIN_TEST_BATCHNORM", "1")
    alone = [each for each in options if each not in ("--balance", "--balance-every", "10", "--shares", "2,1,1")]
    batch = [] if "--global-batch-size" in options else ["--batch-size", str(GLOBAL_BATCH)]
    line = [*TRAIN, *alone, *batch, "--steps", "140", "--run-dir", str(tmp_path / "one")]
    one = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert one.returncode == 0, one.stderr
    events = [[30, 0, "SIGKILL", "before"], [60, 1, "SIGKILL", "within"], [120, 1, "SIGTERM", "before"]]
    job = ElasticJob("1:3", tmp_path / "job", events, *options, length=("--steps", "140"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    assert ended.output.count("--shares was for the ranks before") == ("--shares" in options)
    assert_equal_runs(tmp_path / "job" / "run", tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("options", [["--compression", "powersgd:2"], ["--mode", "local", *FEW_BITS]])
def test_error_feedback_continues_with_other_ranks(options, tmp_path):
    """Errors of lost ranks are lost, so that weights are not those of one process; replicas are compared at the end."""
    events = [[30, 0, "SIGKILL", "before"], [60, 1, "SIGKILL", "within"], [100, 1, "SIGTERM", "before"]]
    job = ElasticJob("1:3", tmp_path / "job", events, *options, "--batch-size", "12", length=("--steps", "140"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    assert "weights: equal on all ranks" in ended.output
    found = summary(tmp_path / "job" / "run")
    sizes = [3, *(change["ranks"] for change in found["membership_changes"])]
    assert any(more > fewer for fewer, more in itertools.pairwise(sizes))  # others have joined
    assert "compression" not in options[0] or 0 < found["compression_error"] < 1
    assert found["steps"] == 140
    assert found["loss"] < 1


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


@pytest.mark.usefixtures("_task_can_be_imported")
def test_local_sgd_loses_only_what_lost_ranks_did_not_average(tmp_path):
    """With an average after each step, plain SGD equals one process without the samples of lost ranks' last steps."""
    events = [[40, 2, "SIGKILL", "within"], [60, 0, "SIGKILL", "within"], [120, 1, "SIGTERM", "before"]]
    options = ["--mode", "local", "--sync-every", "1", "--optimizer", "sgd", "--learning-rate", "0.1"]
    job = ElasticJob("1:3", tmp_path, events, *options, "--checkpoint-every", "50", length=("--steps", "130"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    lines = [line for line in ended.output.splitlines() if "local step(s) of 1 rank(s)" in line]
    found = summary(tmp_path / "run")
    # A rank is lost in a step that the others may complete without it, or not have begun.
    assert found["lost_steps"] == len(lines) <= 2
    happened = [(tmp_path / f"events.json.{i}").read_text().split()[1] for i in (0, 1)]
    lost = [(at, rank, int(size)) for (at, rank, *_), size in zip(events, happened, strict=False)]
    expected = one_process_without({each for each in lost if f"before step {each[0] + 1}:" in ended.output}, 130, 0.1)
    ours = weights_in_order(tmp_path / "run")
    assert relative_difference(ours, expected) < 1e-10
    assert found["steps"] == 130


def assert_equal_averages(job: ElasticJob, at_least: int) -> None:
    """Each average is bit-identical in all processes that received it."""
    compared = compared_averages(job.averages)
    assert not compared.differing, compared
    assert compared.shared >= at_least, compared


@pytest.mark.parametrize("more", [["--fragments", "2"], LONG([], id="whole models")])
def test_averages_in_the_background_survive_lost_ranks(more, tmp_path):
    events = [[30, 2, "SIGKILL", "within"], [61, 0, "SIGKILL", "before"], [100, 1, "SIGTERM", "before"]]
    options = ["--mode", "local", "--sync-every", "8", "--overlap", "--outer", "nesterov", "--learning-rate", "0.01"]
    options += more
    ended = end(job := ElasticJob("1:3", tmp_path, events, *options, length=("--steps", "160")))
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    found = summary(tmp_path / "run")
    lines = [line for line in ended.output.splitlines() if "local step(s) of 1 rank(s)" in line]
    # A round in which a rank is lost has up to twice as many steps: those whose average failed, and those since.
    assert 0 < found["lost_steps"] < len(lines) * 16
    assert_equal_averages(job, at_least=10)
    assert found["steps"] == 160
    assert found["samples"] == 5 * 1437 + 10 * GLOBAL_BATCH
    assert found["eval"]["accuracy"] > 0.9


@pytest.mark.parametrize("more", [["--fragments", "2", "--round-quorum", "2"], LONG([], id="whole models")])
def test_a_job_without_waiting_survives_lost_ranks(more, tmp_path):
    # The job is slow until processes train together before each, on a machine of any speed.
    events = [[16, 1, "SIGTERM", "from"], [60, 0, "SIGKILL", "from"], [120, 1, "SIGTERM", "from"]]
    options = ["--mode", "local", "--sync-every", "8", "--wait-free", "--learning-rate", "0.01", *more]
    ended = end(job := ElasticJob("1:3", tmp_path, events, *options, length=("--steps", "240")), 240)
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    assert "leaves: SIGTERM on host" in ended.output
    found = summary(tmp_path / "run")
    assert found["steps"] == 240
    assert found["eval"]["accuracy"] > 0.9
    assert_equal_averages(job, at_least=3)


@pytest.mark.long
def test_the_same_losses_lead_to_the_same_bits(tmp_path):
    """Whichever ranks are lost: the job ends before a process that is started again is ready."""
    digests = []
    for lost in (0, 2):
        events = [[20, lost, "SIGKILL", "within"], [40, min(lost, 1), "SIGKILL", "within"]]
        ended = end(job := ElasticJob("1:3", tmp_path / str(lost), events, length=("--steps", "70")))
        assert ended.code == 0, ended.output
        assert job.happened() == 2, ended.output
        found = summary(tmp_path / str(lost) / "run")
        assert [(change["step"], change["ranks"]) for change in found["membership_changes"]] == [(19, 2), (39, 1)]
        digests.append(found["weights_sha256"])
    assert digests[0] == digests[1]


def one_process_with(changes: dict[int, int], epochs: int, learning_rate: float) -> tuple[list[np.ndarray], int]:
    """The weights after ``epochs``, and the number of steps, if 16 samples and the rate are times the ranks' number."""
    import elastic_task
    import keras

    keras.utils.set_random_seed(0)
    data = elastic_task.TASK.read_data(None)
    model = elastic_task.TASK.make_model(data)
    model.compile(keras.optimizers.Adam(learning_rate), elastic_task.TASK.loss())
    x, y = data.training.x, data.training.y
    step, num_ranks = 0, 3
    for epoch in range(epochs):
        order, done = plan(0, 1, len(x)).order(epoch), 0
        while done < len(x):
            num_ranks = changes.get(step, num_ranks)
            model.optimizer.learning_rate = learning_rate * num_ranks
            numbers = order[done : done + 16 * num_ranks]
            model.train_on_batch(x[numbers], y[numbers])
            done, step = done + len(numbers), step + 1
    return model.get_weights(), step


@pytest.mark.long
@pytest.mark.usefixtures("_task_can_be_imported")
def test_the_batch_and_the_learning_rate_follow_the_number_of_ranks(tmp_path):
    events = [[40, 2, "SIGKILL", "within"], [130, 0, "SIGKILL", "before"], [220, 1, "SIGTERM", "before"]]
    options = ["--rescale", "--lr-scaling", "linear", "--learning-rate", "0.001"]
    ended = end(job := ElasticJob("1:3", tmp_path, events, *options, length=("--epochs", "9")))
    assert ended.code == 0, ended.output
    assert job.happened() == 3, ended.output
    found = summary(tmp_path / "run")
    changes = {change["step"]: change["ranks"] for change in found["membership_changes"]}
    expected, steps = one_process_with(changes, 9, 0.001)
    assert relative_difference(weights_in_order(tmp_path / "run"), expected) < 1e-10
    assert (found["steps"], found["epochs"], found["samples"]) == (steps, 9, 9 * 1437)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["event"] == "eval"]
    assert [(line["epoch"], line["samples"]) for line in evaluated] == [(e, e * 1437) for e in range(1, 10)]
    # One rank resumes it.
    line = [*TRAIN, *options, "--epochs", "10", "--run-dir", str(tmp_path / "run")]
    again = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    resumed = summary(tmp_path / "run")
    expected, steps = one_process_with({**changes, found["steps"]: 1}, 10, 0.001)
    assert relative_difference(weights_in_order(tmp_path / "run"), expected) < 1e-10
    assert (resumed["steps"], resumed["epochs"], resumed["samples"]) == (steps, 10, 10 * 1437)


@pytest.mark.long
def test_local_sgd_loses_nothing_of_ranks_that_leave(tmp_path):
    events = [[30, 1, "SIGTERM", "before"], [61, 0, "SIGTERM", "before"]]
    job = ElasticJob("1:3", tmp_path, events, "--mode", "local", "--sync-every", "8", length=("--steps", "100"))
    ended = end(job)
    assert ended.code == 0, ended.output
    assert job.happened() == 2, ended.output
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
    assert job.happened() == 2, ended.output
    assert "stopped at step" in ended.output
    # One process finishes it.
    train_alone(tmp_path / "run", STEPS)
    assert 99 <= summary(tmp_path / "run")["resumed_from"] <= 101
    assert_equal_runs(tmp_path / "run", one_process)


def test_a_stopped_rank_strangers_and_a_stop(one_process, tmp_path):
    job = ElasticJob("1:2", tmp_path, [[60, 1, "SIGSTOP", "within"]], "--stall-timeout", "10")
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
        assert other.returncode == 78, other.stderr + job.output
        assert (
            "must have the options and versions of the job. Received: --stall-timeout: 600.0, not 10.0" in other.stderr
        )
        job.wait_for("lost rank 1")
        assert "no heartbeat for 10 s" in job.output
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


@pytest.mark.long
def test_fixed_ranks_resume_a_checkpoint_of_an_elastic_job_or_refuse_it(tmp_path):
    """The modes whose updates are those of one process resume it; those that train otherwise refuse it in a line."""
    options = ["--batch-size", "24", "--eval-every", "0"]
    ended = end(job := ElasticJob("1:2", tmp_path / "job", [], *options, length=("--steps", "60")))
    assert ended.code == 0, ended.output
    resumed = {"sync": [], "sharded": ["--shard-optimizer"], "accumulation": [*ACCUMULATION[:2], "--batch-size", "8"]}
    local = ["--mode", "local", "--sync-every", "8"]
    refused = {"local": local, "wait-free": [*local, "--wait-free"], "quorum": ["--quorum", "1"]}
    lines = []
    for name, more in {**resumed, **refused}.items():
        shutil.copytree(job.folder / "run", tmp_path / name)
        lines.append([*TRAIN[3:], *options, "--steps", "120", "--run-dir", tmp_path / name, *more])
    found = run_commands(lines, ranks=2, folder=tmp_path / "output", timeout_s=200)
    one = train_alone(tmp_path / "one", 120, options=["--eval-every", "0"])
    for name, done in zip([*resumed, *refused], found, strict=True):
        if name in resumed:
            assert done.code == 0, done.output
            assert_equal_runs(tmp_path / name, one)
        else:
            assert done.code == 65, done.output
            assert "a run must resume from its own checkpoint" in done.only_message


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


def _fit(folder: Path, *what: str, members: str = "1:2") -> tuple[Finished, list[str]]:
    """Runs model.fit in an elastic loop; returns how it ended, and what its checks have found."""
    folder.mkdir()
    program = [sys.executable, str(TESTS / "elastic_fit.py"), str(folder), *what]
    ended = end(Job([sys.executable, "-m", "hvdtrain", "elastic", members, *program], ranks=0, launcher=""))
    checks = folder / "checks"
    return ended, checks.read_text().splitlines() if checks.exists() else []


def test_model_fit_in_a_loop_is_checked_and_continues_when_ranks_change(tmp_path):
    one, checks = _fit(tmp_path / "one", members="1:1")
    assert (one.code, checks) == (0, []), one.output
    ours, checks = _fit(tmp_path / "ours", "lost")
    assert ours.code == 0, ours.output
    assert ours.output.count("hvdtrain elastic: lost rank") == 1, ours.output
    assert "2 rank(s), 1 of them new" in ours.output
    assert set(checks) == {"2 equal"}
    with np.load(tmp_path / "one" / "weights.npz") as expected, np.load(tmp_path / "ours" / "weights.npz") as found:
        assert expected.files == found.files
        for name in expected.files:
            assert np.allclose(found[name], expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_model_fit_in_a_loop_that_is_not_that_of_one_process_ends(tmp_path):
    ended, checks = _fit(tmp_path / "unequal", "unequal")
    assert ended.code == 64, ended.output
    assert len(checks) == 1
    assert "the output of layer 'sequential/centred_over_the_batch'" in checks[0]
    assert "hvdtrain.elastic.init(on_unequal='warn')" in ended.output


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
