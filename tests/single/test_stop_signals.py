"""Signals that stop a job: real processes, without Horovod."""

import gc
import os
import re
import signal
import socket
import subprocess
import threading
from typing import Any

import pytest
from made_up_jobs import ThreadCollectives, on_threads, wait_until

from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import processes


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_stops_all_ranks_at_one_step(name, start):
    job = start("training", 3)
    job.wait_for("ready")
    for _ in range(2):  # As launchers send it.
        job.ranks[1].send_signal(signal.Signals[name])
    ranks = job.ended(5)
    assert [rank.code for rank in ranks] == [75] * 3, ranks
    said = "Ctrl-C" if name == "SIGINT" else name
    assert len({re.search(rf"stops at \d+: {said} on rank 1 \(host .+\)", rank.output)[0] for rank in ranks}) == 1
    assert re.fullmatch(r"hvdtrain: rank 0 \(host .+\): stopped at step \d+; resume to continue\n", ranks[0].errors)
    assert ranks[1].errors == ranks[2].errors == ""


def test_sigterm_is_received_while_the_main_thread_is_in_c(start):
    job = start("stopped_in_c")
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGTERM)
    ranks = job.ended(5)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks
    for rank in ranks:
        assert "received SIGTERM on rank 0" in rank.output
        assert "stops" in rank.output


def test_only_a_later_second_signal_ends_the_job_at_once(start):
    job = start("stopping_slowly")
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGINT)
    job.wait_for("received")
    job.ranks[0].send_signal(signal.SIGTERM)
    for rank in job.ranks:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.2)
    (job.folder / "later").touch()
    job.ranks[0].send_signal(signal.SIGTERM)
    ranks = job.ended(1)
    assert [(rank.code, rank.errors) for rank in ranks] == [(75, "")] * 2, ranks


def test_the_end_of_horovodrun_stops_the_job(monkeypatch):
    """SIGTERM ends its shell, which does not forward it."""
    shell = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(processes, "horovodrun_above", lambda: shell.pid)

    def run(collectives: ThreadCollectives) -> str | None:
        with JobWatch(collectives) as watch:
            assert not watch.check()
            collectives.barrier()
            if collectives.rank == 0:
                shell.terminate()  # It stays as a zombie.
            wait_until(lambda: watch.stop_requested)
            assert watch.check()
            return watch.stop_reason

    try:
        reasons = on_threads(2, run)
        assert re.fullmatch(r"horovodrun ended, detected by rank [01] \(host .+\)", str(reasons[0])), reasons
        assert reasons[0] == reasons[1]
    finally:
        shell.kill()
        shell.wait()


def test_signal_handlers_are_restored():
    def own_handler(number: int, frame: Any) -> None:
        pass

    gc.collect()  # Otherwise what earlier tests have left may be closed meanwhile.
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
            wait_until(lambda: watch.stop_requested)
        assert signal.getsignal(signal.SIGTERM) is own_handler
        assert signal.getsignal(signal.SIGINT) is before_int
        assert signal.set_wakeup_fd(-1) == writer.fileno()
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(signal.SIGTERM, before)
        reader.close()
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdtrain-monitor"]


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with JobWatch(ThreadCollectives(0, [None], threading.Barrier(1))):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_after_the_end_does_not_change_the_exit_code(start):
    """Rank 1 has ended its watch and ends slowly, as TensorFlow does."""
    job = start("ending_slowly")
    job.wait_for("has ended", 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        job.ranks[1].send_signal(number)
    (job.folder / "finish").touch()
    assert [rank.code for rank in job.ended(5)] == [75, 75]
