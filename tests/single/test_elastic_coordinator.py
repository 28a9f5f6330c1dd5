"""The coordinator of an elastic job: what it tells its members, which are sockets without processes."""

import contextlib
import errno
import json
import socket
import time
import urllib.request

import pytest
from coordinated_jobs import CoordinatedJob
from made_up_jobs import wait_until

from hvdtrain.distributed.key_value_server import authorization


class Member:
    """A member without a process: sends and receives lines."""

    def __init__(self, job: CoordinatedJob, token: str = "secret", **hello):
        self._socket = socket.create_connection(("127.0.0.1", job.coordinator.port), timeout=5)
        self._lines = self._socket.makefile("r")
        facts = {
            "kind": "hello",
            "token": token,
            "host": "a",
            "pid": 1,
            "worker": 1,
            "facts": {"--x": 1},
            "stall_timeout_s": 0,
        }
        self.send(**{**facts, **hello})

    def send(self, **message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, kind: str) -> dict:
        """The next message of a kind; heartbeats and others are passed over."""
        until = time.monotonic() + 10
        for line in self._lines:
            message = json.loads(line)
            if message["kind"] == kind:
                return message
            assert time.monotonic() < until, f"never received {kind}"
        raise EOFError

    def die(self) -> None:
        self._lines.close()
        self._socket.close()


def started(job: CoordinatedJob, size: int, **hello) -> list[Member]:
    members = [Member(job, **hello) for _ in range(size)]
    for i, member in enumerate(members):
        assert member.receive("welcome")["must_warm_up"] is False
        assert member.receive("begin")["members"][i] == i
    return members


def hold_at_one_check(members: list[Member], generation: int) -> None:
    """Pauses all members of a generation for a change."""
    for member in members:
        assert member.receive("propose")["stops"] is False
        member.send(kind="answer", passed=1)
    for member in members:
        member.receive("decision")
        member.send(kind="hold", generation=generation)


def test_survivors_are_cut_off_and_continue(jobs):
    job = jobs(1, 3)
    first, second, third = started(job, 3)
    third.send(kind="heartbeat", heartbeats=7, step=41)
    wait_until(lambda: any(peer.step == 41 for peer in job.coordinator.peers))
    third.die()
    for member in (first, second):
        assert member.receive("cut")["generation"] == 1
        member.send(kind="hold", generation=1)
    assert first.receive("begin")["members"] == second.receive("begin")["members"] == [0, 1]
    assert any("lost rank 2 (host a, process 1) at step 41" in line for line in job.said)
    assert job.removed == [1]


def test_a_loss_in_the_rendezvous_begins_another_generation(jobs):
    job = jobs(1, 3)
    first, second, third = started(job, 3)
    third.die()
    first.receive("cut")
    first.send(kind="hold", generation=1)
    second.send(kind="hold", generation=1)
    port = first.receive("begin")["port"]
    second.die()
    assert first.receive("cut")["generation"] == 2
    # Whoever still waits in the rendezvous fails: nothing is no address.
    url = f"http://127.0.0.1:{port}/global/addresses-0-2"
    with urllib.request.urlopen(urllib.request.Request(url, headers=authorization("secret"))) as response:
        assert response.read() == b""
    first.send(kind="hold", generation=2)
    begins = first.receive("begin")
    assert (begins["number"], begins["members"]) == (3, [0])


def test_a_generation_whose_reductions_fail_is_formed_again(jobs):
    """Nobody is lost: a rank was suspended for longer than Gloo waits."""
    job = jobs(1, 2)
    first, second = started(job, 2)
    first.send(kind="broken", generation=1)
    for member in (first, second):
        assert member.receive("cut")["generation"] == 1
        member.send(kind="hold", generation=1)
    assert first.receive("begin")["members"] == [0, 1]
    # Too late: it is about a generation that is over.
    second.send(kind="broken", generation=1)
    second.receive("heartbeat")
    assert job.coordinator.generation == 2
    assert job.coordinator.lost == 0


def test_all_pause_at_one_check_for_a_newcomer(jobs):
    job = jobs(1, 3, start_size=2)
    first, second = started(job, 2)
    newcomer = Member(job)
    assert newcomer.receive("welcome")["must_warm_up"] is True
    newcomer.send(kind="ready")
    for member, passed in ((first, 4), (second, 6)):
        assert member.receive("propose")["stops"] is False
        member.send(kind="answer", passed=passed)
    assert first.receive("decision")["check"] == second.receive("decision")["check"] == 7
    for member in (first, second):
        member.send(kind="hold", generation=1)
    assert newcomer.receive("begin")["members"] == [0, 1, 2]


def test_a_rank_that_leaves_ends_when_the_others_have_paused(jobs):
    job = jobs(1, 2)
    first, second = started(job, 2)
    first.send(kind="leave", reason="SIGTERM on host a")
    hold_at_one_check([first, second], generation=1)
    assert first.receive("dismissed")
    assert second.receive("begin")["members"] == [1]
    first.die()
    time.sleep(0.05)
    assert not any("lost" in line for line in job.said)


def test_the_last_rank_that_leaves_stops_the_job(jobs):
    job = jobs(1, 1)
    (only,) = started(job, 1)
    only.send(kind="leave", reason="SIGTERM on host a")
    assert only.receive("propose") == {"kind": "propose", "reason": "SIGTERM on host a", "stops": True}
    only.send(kind="answer", passed=0)
    assert only.receive("decision")["check"] == 1
    only.send(kind="bye", code=0)
    wait_until(lambda: job.coordinator.exit_code == 75)


def test_all_ranks_that_leave_at_once_stop_the_job_together(jobs):
    job = jobs(1, 2)
    members = started(job, 2)
    for member in members:
        member.send(kind="leave", reason="SIGTERM on host a")
    # The first one makes all pause, the second one makes them save.
    pauses = [not member.receive("propose")["stops"] for member in members]
    for member in members:
        member.send(kind="answer", passed=0)
    for member in members:
        member.receive("decision")
    if all(pauses):
        for member in members:
            member.send(kind="hold", generation=1)
        for member in members:
            begins = member.receive("begin")
            assert (begins["members"], begins["is_last"]) == ([0, 1], True)
    for member in members:
        member.send(kind="bye", code=75)
    wait_until(lambda: job.coordinator.exit_code == 75)


def test_members_whose_hosts_are_all_taken_stay_until_others_have_their_state(jobs):
    job = jobs(1, 1)
    (old,) = started(job, 1)
    job.coordinator.ask_to_leave(1, "its host was taken from the job")
    newcomer = Member(job, worker=2)
    newcomer.receive("welcome")
    newcomer.send(kind="ready")
    hold_at_one_check([old], generation=1)
    assert newcomer.receive("begin")["members"] == [0, 1]
    hold_at_one_check([old, newcomer], generation=2)
    assert old.receive("dismissed")
    assert newcomer.receive("begin")["members"] == [1]
    assert job.coordinator.exit_code is None


@pytest.mark.parametrize("size", [1, 2])
def test_the_exit_code_of_an_error_on_all_ranks_is_that_of_the_job(jobs, size):
    job = jobs(1, size)
    for member in started(job, size):
        member.send(kind="bye", code=70)
    wait_until(lambda: job.coordinator.exit_code == 70)


def test_too_few_members_save_and_end_after_the_timeout(jobs):
    job = jobs(2, 2, timeout_s=0.05)
    first, second = started(job, 2)
    second.die()
    first.receive("cut")
    first.send(kind="hold", generation=1)
    begins = first.receive("begin")
    assert (begins["members"], begins["is_last"]) == ([0], True)
    first.send(kind="bye", code=0)
    wait_until(lambda: job.coordinator.exit_code == 75)


def test_the_job_ends_if_all_members_are_lost(jobs):
    job = jobs(1, 2)
    for member in started(job, 2):
        member.die()
    wait_until(lambda: job.coordinator.exit_code == 1)
    assert "all members were lost" in job.said[-1]


def test_the_error_of_one_rank_ends_all(jobs):
    job = jobs(1, 2)
    first, second = started(job, 2)
    first.send(kind="end", code=70)
    assert second.receive("end")["code"] == 70
    assert job.coordinator.exit_code == 70


def test_a_loss_where_ranks_cannot_change_starts_all_again(jobs):
    job = jobs(1, 2)

    def survivor() -> Member:
        first, second = started(job, 2)
        second.die()
        first.receive("cut")
        first.send(kind="restart")
        return first

    for _ in range(3):
        first = survivor()
        first.receive("restart")
        first.die()
    assert job.coordinator.exit_code is None
    assert survivor().receive("end")["code"] == 1
    assert job.said[-1] == "a member was lost before the first step or after the last 4 times."


def test_strangers_are_disconnected_and_change_nothing(jobs):
    job = jobs(1, 2)
    members = started(job, 2)
    for hello in ({"token": "guess"}, {"token": "\udcc3"}, {"facts": 3}, {"pid": "x"}, {"kind": "end", "code": 5}):
        with pytest.raises((EOFError, ConnectionResetError)):
            Member(job, **hello).receive("welcome")
    for garbage in (b"\xff\xfe\n", b"[1]\n", b"{" * 3_000_000):
        with socket.create_connection(("127.0.0.1", job.coordinator.port), timeout=5) as stranger:
            try:
                stranger.sendall(garbage)
                assert stranger.recv(1) == b""
            except ConnectionError:
                pass
    assert (job.coordinator.exit_code, job.coordinator.lost) == (None, 0)
    assert len(members) == 2


def test_silent_strangers_are_disconnected_and_keep_nobody_out(jobs):
    job = jobs(1, 3, start_size=2)
    members = started(job, 2)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", job.coordinator.port)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=2)) for _ in range(200)]
        assert strangers[0].recv(1) == b""  # The oldest make room, long before their time is up.
        newcomer = Member(job)
        assert newcomer.receive("welcome")["must_warm_up"] is True
        wait_until(lambda: len(job.coordinator.peers) <= 64 + 3)
    assert (job.coordinator.exit_code, job.coordinator.lost) == (None, 0)
    assert len(members) == 2


def test_connections_that_cannot_be_accepted_are_tried_again(jobs):
    job = jobs(1, 3, start_size=2)
    members = started(job, 2)
    listener = job.coordinator.peers._listener

    class WithoutDescriptors:
        fileno = listener.fileno
        getsockname = listener.getsockname
        close = listener.close
        left = 1

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

    job.coordinator.peers._listener = WithoutDescriptors()
    newcomer = Member(job)
    assert newcomer.receive("welcome")
    assert any("a process cannot be connected (Too many open files); trying again" in line for line in job.said)
    assert job.coordinator.exit_code is None
    assert len(members) == 2


def test_a_member_speaks_for_itself_and_in_numbers_that_can_be_held(jobs):
    job = jobs(1, 3, start_size=2)
    first, second = started(job, 2)
    newcomer = Member(job)
    newcomer.receive("welcome")
    newcomer.send(kind="end", code=9)
    newcomer.send(kind="restart")
    newcomer.send(kind="heartbeat", heartbeats=1, step=1)
    wait_until(lambda: any(peer.heartbeats for peer in job.coordinator.peers))
    assert (job.coordinator.exit_code, job.coordinator.generation) == (None, 1)
    second.send(kind="answer", passed=10**40)
    assert first.receive("cut")["generation"] == 1
    assert any("it sent a number that no process sends" in line for line in job.said)
    assert job.coordinator.exit_code is None


def test_a_process_with_other_options_is_refused(jobs):
    job = jobs(1, 3, start_size=2)
    members = started(job, 2)
    refused = Member(job, facts={"--x": 2, "--y": 3}).receive("refused")
    assert refused["code"] == 78
    assert "Received: --x: 2, not 1; --y: 3, not 'missing'" in refused["text"]
    assert (job.coordinator.lost, len(members)) == (0, 2)


@pytest.mark.parametrize("heartbeats", [1, 0], ids=["trains", "waits for the silent one"])
def test_a_silent_member_is_removed(jobs, heartbeats):
    now = [0.0]
    job = jobs(1, 2, clock=lambda: now[0])
    first, _silent = started(job, 2, stall_timeout_s=5)
    now[0] = 4.0
    first.send(kind="heartbeat", heartbeats=heartbeats, step=1)
    wait_until(lambda: any(peer.received_at == 4.0 for peer in job.coordinator.peers))
    now[0] = 6.0
    assert first.receive("cut")["generation"] == 1
    assert any("no heartbeat for 5 s" in line for line in job.said)
    # Also a member that has waited for the silent one has time to hold.
    time.sleep(0.1)
    assert job.coordinator.exit_code is None
    first.send(kind="hold", generation=1)
    assert first.receive("begin")["number"] == 2


def test_the_member_that_the_others_wait_for_is_removed(jobs):
    now = [0.0]
    job = jobs(1, 2, clock=lambda: now[0])
    first, second = started(job, 2, stall_timeout_s=5)
    first.send(kind="heartbeat", heartbeats=3, step=2)
    second.send(kind="heartbeat", heartbeats=2, step=1)
    wait_until(lambda: sorted(peer.heartbeats for peer in job.coordinator.peers) == [2, 3])
    for now[0] in (3.0, 6.0):  # Both are alive, and neither makes progress.
        first.send(kind="heartbeat", heartbeats=3, step=2)
        second.send(kind="heartbeat", heartbeats=2, step=1)
        time.sleep(0.05)
    assert first.receive("cut")["generation"] == 1
    assert any("the others have waited for it for 5 s" in line for line in job.said)
