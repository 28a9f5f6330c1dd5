"""Fixtures shared by several test files."""

import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import restarted_jobs
from coordinated_jobs import CoordinatedJob
from made_up_jobs import Job

from hvdtrain.config.wording import naming_flags
from hvdtrain.fault_tolerance.elastic.membership import Membership


def _signal_handlers() -> dict[signal.Signals, object]:
    return {
        number: signal.getsignal(number) for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    }


@pytest.fixture(autouse=True)
def unchanged_signals():
    """Fails a test that leaves another signal handler: the processes of later tests would inherit an ignored signal."""
    before = _signal_handlers()
    yield
    assert _signal_handlers() == before


@pytest.fixture(autouse=True)
def same_random_numbers():
    """A test draws the same weights, samples and dropout masks in each run: it fails always or never.

    Keras takes the seeds of layers and initializers without one from Python's random numbers.
    """
    random.seed(1)
    np.random.seed(1)


@pytest.fixture
def as_a_command():
    """Messages name flags, as they do while a command runs."""
    with naming_flags():
        yield


@pytest.fixture
def restored_signals(unchanged_signals):
    """For a test whose code ends the process and therefore ignores signals from then on."""
    before = _signal_handlers()
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def start(tmp_path):
    """Starts jobs and kills their processes after the test."""
    jobs = []

    def start(scenario: str, size: int = 2, *, stall_timeout_s: float = 0.0) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(scenario, size, folder, stall_timeout_s))
        return jobs[-1]

    yield start
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def job(tmp_path):
    """A job under launch/run --restarts, whose processes are killed after the test."""
    job = restarted_jobs.Job(tmp_path)
    yield job
    for process in job.processes:
        process.kill()
        process.wait()
        process.stdout.close()  # communicate() would wait for a zombie's parent, which holds it open.


@pytest.fixture(scope="session")
def two_checkpoints(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, and the values of the model at each."""
    from small_checkpoints import X, Y, all_values, checkpointer, make  # TensorFlow, which few tests need

    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    model, values = make(), {}
    saver = checkpointer(folder, model)
    for step in (1, 2):
        model.train_on_batch(X, Y)
        values[step] = all_values(model)
        saver.save(step, state={"best": 0.25}, wait=True)
    return folder, values


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Sets another cache folder for local copies of object stores: an empty disk."""

    def use(name: str) -> Path:
        monkeypatch.setenv("HVDTRAIN_STORE_CACHE", str(tmp_path / name))
        return tmp_path / name

    use("cache")
    return use


@pytest.fixture
def s3_url(cache):
    """The URL of an empty folder on an S3 server."""
    from s3_server import s3_server

    with s3_server() as bucket:
        yield f"{bucket}/folder"


@pytest.fixture
def url(cache):
    """The URL of an empty folder in memory."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield "memory://bucket/folder"
    MemoryFileSystem.store.clear()


@pytest.fixture
def jobs():
    """Starts coordinators of elastic jobs and closes them after the test."""
    made: list[CoordinatedJob] = []

    def make(minimum: int, maximum: int, **options) -> CoordinatedJob:
        made.append(CoordinatedJob(Membership(minimum, maximum), **options))
        return made[-1]

    yield make
    for job in made:
        job.close()
