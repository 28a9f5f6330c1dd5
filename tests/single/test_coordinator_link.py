"""A process of an elastic job follows its coordinator."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from coordinated_jobs import CoordinatedJob
from made_up_jobs import wait_until

from hvdtrain.errors import DisagreementError, HvdtrainError
from hvdtrain.fault_tolerance.elastic import admission
from hvdtrain.fault_tolerance.elastic.admission import Admission, request_admission
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch


def admitted(job: CoordinatedJob, *, token: str = "secret", option: int = 1) -> Admission:
    return request_admission(("127.0.0.1", job.coordinator.port), token, {"--x": option}, stall_timeout_s=0)


@pytest.fixture
def member() -> Iterator[Callable[..., ElasticWatch]]:
    made: list[ElasticWatch] = []

    def join(job: CoordinatedJob) -> ElasticWatch:
        made.append(ElasticWatch(admitted(job), stall_timeout_s=0))
        made[-1].start()
        return made[-1]

    yield join
    for watch in made:
        watch.close()


def test_a_member_trains_until_the_coordinator_stops_it(jobs, member):
    job = jobs(1, 1)
    watch = member(job)
    generation = watch.coordinator.next_generation()
    assert (generation.number, generation.members) == (1, (watch.coordinator.number,))
    assert not watch.coordinator.must_warm_up
    assert not watch.check()
    job.coordinator.stop("a test")
    wait_until(lambda: watch.stop_requested)
    assert watch.check()
    assert watch.stop_reason == "a test"
    assert not watch.coordinator.must_hold
    watch.close()
    wait_until(lambda: job.coordinator.exit_code == 75)


def test_a_signal_makes_a_member_leave(jobs, member):
    watch = member(jobs(1, 1))
    watch.coordinator.next_generation()
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: watch.stop_requested)
    assert watch.check()
    assert watch.stop_reason.startswith("SIGTERM on host ")


def test_a_loss_cuts_the_reductions_of_the_others(jobs, member):
    cut = []
    job = jobs(1, 2)
    watch, other = member(job), admitted(job)
    watch.coordinator.cut_with(lambda: cut.append(1))
    assert len(watch.coordinator.next_generation().members) == 2
    other.connection.close()
    wait_until(lambda: cut == [1])
    assert watch.coordinator.is_cut
    assert watch.check()
    assert watch.coordinator.must_hold
    assert watch.coordinator.next_generation().members == (watch.coordinator.number,)


def test_a_forked_child_closes_its_copies(jobs, member):
    """An open one would hide the end of the member from the coordinator, and its signals would go to the member."""
    watch = member(jobs(1, 1))
    watch.coordinator.next_generation()
    num_open = len(os.listdir("/proc/self/fd"))
    child = os.fork()
    if child == 0:
        # The connection, the selector, and both ends of the pair that wakes the thread; more if another test has left a
        # monitor thread.
        is_closed = len(os.listdir("/proc/self/fd")) <= num_open - 4
        os._exit(0 if is_closed and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not watch.check()


def test_who_is_no_member_is_refused(jobs, monkeypatch):
    job = jobs(1, 2)
    first = admitted(job)
    with pytest.raises(DisagreementError, match="--x: 2, not 1"):
        admitted(job, option=2)
    monkeypatch.setattr(admission, "_WELCOME_S", 1.0)
    with pytest.raises(HvdtrainError, match="is HVDTRAIN_ELASTIC_TOKEN that of the job"):
        admitted(job, token="guess")
    first.connection.close()
