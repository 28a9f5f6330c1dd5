"""Ranks that are killed, stopped, stuck or asked to stop: real processes and signals, without Horovod."""

import dataclasses
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import process
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.failure import JobError, JobWatch, channel
from hvdtrain.failure.agreement import StopPoint, StopVote
from hvdtrain.failure.channel import Connection
from hvdtrain.failure.position import Position, Standstill

RANK = Path(__file__).with_name("watched_rank.py")
GOES_ON = r"The job ends; started again, it goes on from its last checkpoint\."


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    code: int
    output: str
    errors: str


class Job:
    """The processes of a made-up job."""

    def __init__(self, scenario: str, size: int, folder: Path, stall_timeout_s: float):
        self.folder = folder
        self.ranks = [
            subprocess.Popen(
                [sys.executable, RANK, scenario, str(rank), str(size), folder, str(stall_timeout_s)],
                stdout=subprocess.PIPE,
                stderr=(folder / f"stderr.{rank}").open("w"),
                text=True,
            )
            for rank in range(size)
        ]

    def wait_for(self, text: str, *ranks: int) -> list[str]:
        """The first line of each of the ranks (default: of all) that has this text."""
        outputs = [self.ranks[rank].stdout for rank in ranks or range(len(self.ranks))]
        return [next(line for line in output if text in line) for output in outputs if output is not None]

    def ended(self, within_s: float, *ranks: int) -> list[Ended]:
        """The ranks (default: all), which must be gone within this time."""
        until = time.monotonic() + within_s
        found = []
        for rank in ranks or range(len(self.ranks)):
            process = self.ranks[rank]
            output, _ = process.communicate(timeout=max(0.01, until - time.monotonic()))
            found.append(Ended(process.returncode, output, (self.folder / f"stderr.{rank}").read_text()))
        return found


@pytest.fixture
def start(tmp_path):
    """Starts jobs, of which nothing is left afterwards."""
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


# Stopping at one point.


class ThreadCollectives:
    """Gathers among threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier):
        self.rank = rank
        self.size = len(values)
        self._values = values
        self._barrier = barrier

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(20)
        values = list(self._values)
        self._barrier.wait(20)
        return values

    def barrier(self) -> None:
        self._barrier.wait(20)


def on_threads(size: int, run: Any, make: Any = ThreadCollectives) -> list[Any]:
    """What a function gives back for the collectives of each rank; an error is given back too."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = ["hangs"] * size

    def run_rank(rank: int) -> None:
        try:
            results[rank] = run(make(rank, shared, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    return results


@pytest.mark.parametrize("seed", range(80))
def test_ranks_agree_on_one_check(seed):
    """Some checks are followed by a collective; whoever stopped elsewhere would leave the others in it."""
    choose = random.Random(seed)
    size = choose.randint(2, 4)
    checks = choose.randint(1, 60)
    meetings = {check for check in range(checks) if choose.random() < choose.choice((0.1, 0.9))}
    # Up to three ranks are asked, one of them perhaps after its last check.
    asked = {choose.randrange(size): choose.randrange(checks + 1) for _ in range(choose.randint(1, 3))}
    pauses = [[choose.choice((0, 0, 0, 0.0005, 0.002)) for _ in range(checks)] for _ in range(size)]

    def run(collectives: ThreadCollectives) -> int | None:
        with JobWatch(collectives) as watch:
            for check in range(checks):
                if asked.get(collectives.rank) == check:
                    watch.request_stop(f"rank {collectives.rank}")
                time.sleep(pauses[collectives.rank][check])
                if watch.check():
                    assert watch.stop_is_coming
                    assert watch.stop_reason in {f"rank {rank}" for rank in asked}
                    return check
                if check in meetings:
                    collectives.barrier()
            if asked.get(collectives.rank) == checks:
                watch.request_stop("too late")
            return None

    results = on_threads(size, run)
    assert len(set(results)) == 1, results
    assert results[0] is None or results[0] in range(checks), results


def test_a_rank_that_waits_for_the_decision_holds_up_nobody():
    """Rank 1 has passed no check and holds still; rank 0 waits for it in a collective meanwhile."""
    size, order = 2, []

    def run(collectives: ThreadCollectives) -> list[bool]:
        with JobWatch(collectives) as watch:
            answers = []
            if collectives.rank == 0:
                answers.append(watch.check())
            collectives.barrier()
            if collectives.rank == 1:
                watch.request_stop("asked")
                while not watch.stop_is_coming:
                    time.sleep(0.001)
                answers.append(watch.check())
                order.append("rank 1 goes on")
            else:
                order.append("rank 0 waits")
            collectives.barrier()
            return [*answers, watch.check()]

    assert on_threads(size, run) == [[False, True]] * 2
    assert order == ["rank 0 waits", "rank 1 goes on"]


def test_a_stop_that_comes_too_late_for_rank_0_stops_nobody():
    has_left = threading.Event()

    def run(collectives: ThreadCollectives) -> list[bool]:
        watch = JobWatch(collectives)
        with watch:
            answers = [watch.check()]
            if collectives.rank == 1:
                has_left.wait(10)
                watch.request_stop("asked")
            answers.append(watch.check())
        if collectives.rank == 0:
            has_left.set()
        return answers

    assert on_threads(2, run) == [[False, False]] * 2


def test_rank_0_may_leave_before_it_decides():
    """It has passed all checks then; whoever holds still has to pass them too."""
    point = StopPoint()
    point.propose("asked")
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(point.check()), daemon=True)
    thread.start()
    thread.join(0.1)
    assert answers == []
    assert point.withdraw() == 0
    thread.join(5)
    assert answers == [False]


def test_one_rank_stops_at_its_next_check(start):
    def run(collectives: ThreadCollectives) -> list[bool]:
        with JobWatch(collectives) as watch:
            assert watch.stop_reason is None
            answers = [watch.check(), watch.check()]
            watch.request_stop("asked")
            while not watch.stop_is_coming:
                time.sleep(0.001)
            return [*answers, watch.check(), watch.check()]

    assert on_threads(1, run) == [[False, False, True, True]]
    job = start("training", 1)
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGINT)
    (rank,) = job.ended(3)
    assert rank.code == 75, rank
    assert re.search(r"stops at \d+: SIGINT on rank 0 \(host .+\)", rank.output)


def test_the_vote_is_decided_once():
    vote = StopVote(2)
    vote.record(1, 7)  # It has left.
    assert vote.decision() is None
    assert vote.open()
    assert not vote.open()
    vote.record(0, 3)
    assert vote.decision() == 8
    assert vote.decision() is None


def test_a_check_takes_no_time():
    def run(collectives: ThreadCollectives) -> float:
        with JobWatch(collectives) as watch:
            began = time.perf_counter()
            for step in range(10_000):
                watch.check()
                watch.beat("training", step)
            return time.perf_counter() - began

    assert on_threads(1, run)[0] < 0.5


def test_sigterm_stops_all_ranks_at_one_step(start):
    job = start("training", 3)
    job.wait_for("ready")
    for _ in range(2):  # As launchers do.
        job.ranks[1].send_signal(signal.SIGTERM)
    ranks = job.ended(5)
    assert [rank.code for rank in ranks] == [75] * 3, ranks
    assert len({re.search(r"stops at \d+: SIGTERM on rank 1 \(host .+\)", rank.output)[0] for rank in ranks}) == 1
    assert re.fullmatch(r"hvdtrain: rank 0 \(host .+\): stopped at step \d+; resume to go on\n", ranks[0].errors)
    assert ranks[1].errors == ranks[2].errors == ""


def test_sigterm_is_heard_while_the_main_thread_is_in_c(start):
    job = start("stopped_in_c")
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGTERM)
    ranks = job.ended(5)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks
    for rank in ranks:
        assert "heard of SIGTERM on rank 0" in rank.output
        assert "stops" in rank.output


def test_only_a_later_signal_ends_at_once(start):
    job = start("stopping_slowly")
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGINT)
    job.wait_for("heard of")
    job.ranks[0].send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert [rank.poll() for rank in job.ranks] == [None, None]
    job.ranks[0].send_signal(signal.SIGTERM)
    ranks = job.ended(1)
    assert [(rank.code, rank.errors) for rank in ranks] == [(75, "")] * 2, ranks


def test_signals_are_given_back():
    def own_handler(number: int, frame: Any) -> None:
        pass

    descriptors = len(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGTERM, own_handler)
    before_int = signal.getsignal(signal.SIGINT)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    wakeup_fd = signal.set_wakeup_fd(writer.fileno())
    try:
        with JobWatch(ThreadCollectives(0, [None], threading.Barrier(1))) as watch:
            assert signal.getsignal(signal.SIGTERM) is not own_handler
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            while not watch.stop_is_coming:
                time.sleep(0.001)
        assert signal.getsignal(signal.SIGTERM) is own_handler
        assert signal.getsignal(signal.SIGINT) is before_int
        assert signal.set_wakeup_fd(-1) == writer.fileno()
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(signal.SIGTERM, before)
        reader.close()
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdtrain-control"]


# Ranks that are lost.


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (3, 2), (3, 0)])
def test_a_killed_rank_ends_the_job_with_one_line(size, lost, start):
    job = start("waiting", size)
    job.wait_for("ready")
    job.ranks[lost].kill()
    others = [rank for rank in range(size) if rank != lost]
    job.ranks[others[0]].wait(2)
    if lost == 0:
        # A launcher ends all when the first one ends: that is the one that tells.
        time.sleep(0.2)
        assert all(job.ranks[rank].poll() is None for rank in others[1:])
    ranks = job.ended(2, *others)
    assert [rank.code for rank in ranks] == [1] * len(others), ranks
    line = rf"hvdtrain: rank {lost} \(host .+\) is gone at step 120 \(killed, or its host was lost\)\. {GOES_ON}\n"
    assert re.fullmatch(line, "".join(rank.errors for rank in ranks))


def test_a_stopped_rank_is_named(start):
    job = start("waiting", 3, stall_timeout_s=1.2)
    job.wait_for("ready")
    job.ranks[1].send_signal(signal.SIGSTOP)
    ranks = job.ended(4, 0, 2)
    assert [rank.code for rank in ranks] == [1, 1], ranks
    line = (
        rf"hvdtrain: rank 1 \(host .+\) has been silent for 1.2 s, last heard of at step 120 \(evaluation\)\. {GOES_ON}"
    )
    assert re.fullmatch(line + "\n", "".join(rank.errors for rank in ranks))
    job.ranks[1].send_signal(signal.SIGCONT)
    (stopped,) = job.ended(1, 1)
    assert (stopped.code, stopped.errors) == (1, ""), stopped


def test_a_stopped_first_rank_is_named(start):
    job = start("waiting", 3, stall_timeout_s=1.2)
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGSTOP)
    ranks = job.ended(5, 1, 2)
    assert [rank.code for rank in ranks] == [1, 1], ranks
    assert re.fullmatch(
        r"hvdtrain: rank 0 \(host .+\) has been silent for 1.2 s, .*\n", ranks[0].errors + ranks[1].errors
    )
    job.ranks[0].send_signal(signal.SIGCONT)
    (stopped,) = job.ended(3, 0)
    assert (stopped.code, stopped.errors) == (1, ""), stopped


def test_short_stops_are_forgiven(start):
    """Of one rank, then of all, as when their host is suspended: longer than the timeout even."""
    job = start("beating", 2, stall_timeout_s=1.2)
    job.wait_for("ready")
    for stopped, seconds in (([1], 0.6), ([0], 0.6), ([0, 1], 1.5)):
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGCONT)
        time.sleep(0.2)
    ranks = job.ended(6)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_a_rank_that_holds_up_the_others_is_named_with_its_stack(start):
    ranks = start("hung", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    first, *lines = text.splitlines()
    name = r"rank 1 \(host .+\)"
    assert re.fullmatch(rf"hvdtrain: no rank has moved on for 1 s; the others wait for {name}\. {GOES_ON}", first), text
    assert re.fullmatch(rf"  {name} at step 2 \(training\):", lines[0]), text
    assert re.fullmatch(r"    .*watched_rank\.py:\d+, in is_stuck_here", lines[-2]), text
    assert lines[-1].endswith("in wait")
    assert len(lines) <= 9
    assert "wait_for_others" not in text


def test_all_positions_are_told_where_no_rank_is_behind(start):
    ranks = start("hung_alike", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    assert re.match(rf"hvdtrain: no rank has moved on for 1 s\. {GOES_ON}\n", text)
    assert re.search(r"  rank 0 \(host .+\), rank 2 \(host .+\) at step 7 \(training\):\n(    .+\n)*", text)
    assert re.search(r"  rank 1 \(host .+\) at step 7 \(training\):\n(    .+\n)*    .+, in is_stuck_here\n", text)
    assert text.count("hvdtrain:") == 1


def test_one_rank_that_hangs_is_told_with_its_stack(start):
    (rank,) = start("hung_alike", 1, stall_timeout_s=0.5).ended(3)
    assert rank.code == 1
    assert "  rank 0 (host" in rank.errors
    assert "in wait_for_others" in rank.errors


def test_one_rank_that_moves_keeps_the_others_waiting(start):
    ranks = start("one_beats", 2, stall_timeout_s=0.6).ended(7)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_a_standstill_ends_with_any_beat():
    standstill = Standstill(100.0)
    standstill.note(0, Position(0), 130.0)
    assert standstill.lasts_s(130.0) == 30.0
    standstill.is_asked = True
    standstill.answer(0, Position(0), [])
    standstill.note(1, Position(1, "training", 5), 140.0)
    assert not standstill.is_asked
    assert standstill.num_answers == 0
    standstill.forgive(7.0)
    assert standstill.lasts_s(150.0) == 3.0


# Errors.


def test_an_error_of_one_rank_ends_the_others(start):
    ranks = start("fails", 3).ended(4)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    assert re.match(r"hvdtrain: rank 2 \(host .+\) failed at step 4: ValueError: cursed\nTraceback", ranks[2].errors)
    assert ranks[0].errors == ranks[1].errors == ""


def test_an_echo_is_told_only_where_no_cause_comes(start):
    """Horovod's operations fail on rank 0, in one job before it is heard that rank 1 is gone."""
    lost, mismatched = start("echo"), start("echo_without_cause")
    lost.wait_for("ready")
    (lost.folder / "lost").touch()
    time.sleep(0.5)
    lost.ranks[1].kill()
    (rank,) = lost.ended(2, 0)
    assert rank.code == 1
    assert re.fullmatch(r"hvdtrain: rank 1 \(host .+\) is gone .*\n", rank.errors), rank.errors
    ranks = mismatched.ended(6)
    assert [rank.code for rank in ranks] == [1] * 2, ranks
    assert re.match(r"hvdtrain: rank 0 \(host .+\) failed at step 4: RuntimeError: node Horovod", ranks[0].errors)
    assert ranks[1].errors == ""


def test_last_work_is_done_but_not_waited_for_without_end(start):
    job = start("last_work", 3)
    job.wait_for("ready")
    job.ranks[2].kill()
    began = time.monotonic()
    assert [rank.code for rank in job.ended(4.5, 0, 1)] == [1, 1]
    assert time.monotonic() - began > 2
    assert {path.name for path in job.folder.glob("finished*")} == {"finished by 0", "finished by 1"}


def test_a_forked_child_neither_hides_the_end_of_its_rank_nor_catches_signals(start):
    job = start("forked")
    (line,) = job.wait_for("child", 1)
    child = Path("/proc") / line.split()[1]
    try:
        job.wait_for("ready")
        job.ranks[1].kill()
        (rank,) = job.ended(2, 0)
        assert re.search(r"rank 1 \(host .+\) is gone before its first step", rank.errors)
        os.kill(int(child.name), signal.SIGTERM)
        time.sleep(0.1)
        # Gone, or left over by whoever takes in orphans here.
        assert not child.exists() or child.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        if child.exists():
            os.kill(int(child.name), signal.SIGKILL)


# Connections.


@pytest.mark.parametrize("size", [2, 3])
def test_an_orderly_end_is_silent(size, start):
    """The last rank leaves first, then rank 0, then the others."""
    ranks = start("orderly", size, stall_timeout_s=2.0).ended(5)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * size, ranks


def test_nothing_listens_and_nothing_is_left():
    descriptors = len(os.listdir("/proc/self/fd"))

    def run(collectives: ThreadCollectives) -> None:
        gather, offers = collectives.allgather, []
        collectives.allgather = lambda value: offers.append(gather(value)) or offers[-1]
        with JobWatch(collectives):
            collectives.barrier()
            offer = offers[1][0]
            assert offer.addresses == ["127.0.0.1"]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((offer.addresses[0], offer.port))
            collectives.barrier()
            began = time.monotonic()
        assert time.monotonic() - began < 0.5

    assert on_threads(3, run) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdtrain-control"]


def test_hosts_connect_by_address(monkeypatch):
    """Two made-up hosts; at the first address of the first one nobody answers."""
    addresses = channel.host_addresses()
    if not addresses:
        pytest.skip("this host has no address but its own loopback")
    assert not [address for address in addresses if address.startswith("127.")]
    monkeypatch.setattr(process, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(channel, "host_addresses", lambda: ["255.255.255.255", *addresses])

    def run(collectives: ThreadCollectives) -> bool:
        threading.current_thread().name = "host " + "aab"[collectives.rank]
        with JobWatch(collectives) as watch:
            if collectives.rank == 2:
                watch.request_stop("asked")
            while not watch.stop_is_coming:
                time.sleep(0.001)
            return watch.check()

    assert on_threads(3, run) == [True] * 3


def tampered(change: Any) -> Any:
    """Collectives whose rank 1 gets something else for what rank 0 offers."""

    class Tampered(ThreadCollectives):
        def allgather(self, value: Any) -> list[Any]:
            values = super().allgather(value)
            return [change(values[0])] if self.rank == 1 and hasattr(values[0], "token") else values

    return Tampered


@contextmanager
def stranger() -> Iterator[int]:
    """A service that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.setattr(channel, "_TRY_S", 0.2)

    def run(collectives: ThreadCollectives) -> None:
        JobWatch(collectives).start()

    results = on_threads(2, run, tampered(lambda offer: offer._replace(token="0" * 32)))
    assert all(isinstance(result, JobError) for result in results), results
    assert re.search(
        r"Rank 1 on host .* tried: 127\.0\.0\.1 port \d+ \(what answers there is not rank 0", str(results[0])
    )


def test_the_addresses_that_were_tried_are_told(monkeypatch):
    monkeypatch.setattr(channel, "_TRY_S", 0.2)
    with stranger() as port:
        change = lambda offer: offer._replace(port=port)
        results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert all(isinstance(result, JobError) for result in results), results
    assert f"127.0.0.1 port {port} (what answers there is not rank 0 of this job)" in str(results[1])
    monkeypatch.setattr(process, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(channel, "host_addresses", lambda: ["127.0.0.1", "127.0.0.9"])
    change = lambda offer: offer._replace(port=1)
    results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert isinstance(results[0], HvdtrainError)
    assert "127.0.0.1 port 1 (Connection refused); 127.0.0.9 port 1 (Connection refused)" in str(results[0])


def test_strangers_hold_up_nobody():
    """While rank 0 waits for rank 1, others come: silent ones, and ones that talk nonsense."""
    admitted = []

    def run(collectives: ThreadCollectives) -> None:
        gather = collectives.allgather

        def visited(value: Any) -> list[Any]:
            values = gather(value)
            if collectives.rank == 1 and hasattr(values[0], "token"):
                for said in (b"", b"GET / HTTP/1.0\r\n\r\n", b'{"kind": "hello"}\n', b"[" * 5000 + b"\n", b"\xff\n"):
                    visitor = socket.create_connection((values[0].addresses[0], values[0].port))
                    visitor.sendall(said)
                    admitted.append(visitor)
            return values

        collectives.allgather = visited
        with JobWatch(collectives):
            collectives.barrier()
        for visitor in admitted if collectives.rank == 1 else []:
            with visitor:
                visitor.settimeout(2)
                with suppress(ConnectionResetError):
                    assert visitor.recv(100) == b""

    assert on_threads(2, run) == [None] * 2


def test_messages_arrive_whole():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        connection = Connection(listener.accept()[0])
    raw.sendall(b'{"kind": "a"}\n{"ki')
    time.sleep(0.05)
    assert connection.receive() == [{"kind": "a"}]
    raw.sendall(b'nd": "b"}\n')
    time.sleep(0.05)
    assert connection.receive() == [{"kind": "b"}]
    # The other side does not read: nothing blocks, and what is left goes when it reads again.
    while not connection.is_backed_up:
        connection.send({"kind": "x" * 100_000})
    raw.settimeout(5)
    while connection.is_backed_up:
        raw.recv(1 << 20)
        connection.flush()
    raw.close()
    time.sleep(0.05)
    assert connection.receive() == []
    assert connection.is_lost
    connection.close()


def test_arguments_are_checked():
    with pytest.raises(UsageError, match="stall_timeout_s must be"):
        JobWatch(ThreadCollectives(0, [None], threading.Barrier(1)), stall_timeout_s=-1)
