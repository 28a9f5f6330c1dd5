"""Jobs with so many ranks that rank 0 receives fewer heartbeats: one real rank, hundreds of simulated ones."""

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Iterator

import pytest
from made_up_jobs import wait_until
from simulated_ranks import FirstRank, SimulatedRanks

from hvdtrain.errors import HvdtrainError
from hvdtrain.fault_tolerance import control_thread, monitor_thread
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.open_files import OTHER_FILES, allow_connections
from hvdtrain.fault_tolerance.peers import heartbeat_interval_s
from hvdtrain.system.terminal import some_of

SIZE, PER_HOST = 300, 8
HOSTS = [f"host{rank // PER_HOST}" for rank in range(SIZE)]


@pytest.fixture
def others() -> Iterator[SimulatedRanks]:
    ranks = SimulatedRanks(HOSTS, processes=2)
    yield ranks
    ranks.close()


def started(others: SimulatedRanks) -> JobWatch:
    connect = lambda endpoint: others.tell("connect", endpoint)
    watch = JobWatch(FirstRank(HOSTS, connect, lambda: sum(others.answers())))
    watch.start()
    return watch


def test_hundreds_of_ranks_agree_on_a_stop_and_leave(others):
    watch = started(others)
    assert not watch.check()
    others.ask("stop", 217)
    wait_until(lambda: watch.check() or time.sleep(0.01))
    assert re.match("a test", watch.stop_reason)
    wait_until(lambda: sum(count for count, _, _ in others.ask("decisions")) == SIZE - 1)
    assert len(set().union(*(checks for _, checks, _ in others.ask("decisions")))) == 1
    watch.close()
    wait_until(lambda: not sum(count for count, _, _ in others.ask("left")))
    assert [codes for _, codes, _ in others.ask("left")] == [{}, {}]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ranks_that_are_lost_together_are_named_in_one_line(others, monkeypatch):
    ended, written = threading.Event(), []

    class NoExit:
        def __getattr__(self, name: str):
            return getattr(os, name)

        def _exit(self, code: int) -> None:
            ended.set()
            raise SystemExit(code)

    monkeypatch.setattr(control_thread, "os", NoExit())
    monkeypatch.setattr(monitor_thread, "write", written.append)
    # Only after the first loss, which it would otherwise notice together with the next ones.
    monkeypatch.setattr(monitor_thread, "gather_time_s", lambda peers: 1.0 if peers < SIZE - 1 else 0.0)
    watch = started(others)
    watch.heartbeat("training", 47)
    others.ask("lose", [96])
    time.sleep(0.1)
    others.ask("lose", list(range(97, 160)))
    assert ended.wait(10)
    line = "hvdtrain: lost connection to rank 96 (host host12) and 63 more ranks at step 47: killed, or host down."
    assert [text.split(" The job ends")[0] for text in written] == [line]
    wait_until(lambda: not sum(count for count, _, _ in others.ask("left")))
    codes = [code for _, each, _ in others.ask("left") for code in each.values()]
    assert codes == [1] * (SIZE - 1 - 64)
    watch.close()


@pytest.mark.parametrize(
    ("ranks", "timeout_s", "interval_s"),
    [(2, 600, 1), (64, 600, 1), (256, 600, 4), (4096, 600, 64), (4096, 60, 15), (2, 1.2, 0.3), (4096, 0, 64)],
)
def test_heartbeats_of_large_jobs_are_rare_but_in_time_for_the_stall_timeout(ranks, timeout_s, interval_s):
    assert heartbeat_interval_s(ranks, timeout_s) == pytest.approx(interval_s)


@contextlib.contextmanager
def limit_of_open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_rank_0_raises_its_limit_of_open_files(monkeypatch):
    used = len(os.listdir("/proc/self/fd"))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < used + 2500:
        pytest.skip("the administrator's limit of open files is too low")
    with limit_of_open_files(used + 1500):
        allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == used + 1500
        allow_connections(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= used + 1000 + OTHER_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    allow_connections(4000 - used)  # Fewer than would be good to have, and enough.
    assert raised == [(4096, 4096)]
    message = r"one of them for each of 4096 ranks\. Received: a limit of 4096\. Raise the hard limit"
    with pytest.raises(HvdtrainError, match=message):
        allow_connections(4096)


def test_messages_name_some_of_many_ranks():
    assert some_of(["a", "b"]) == "a, b"
    assert some_of([str(i) for i in range(4096)]).endswith("14, 15 and 4,080 more")
