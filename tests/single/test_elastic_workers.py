"""The processes that ``hvdtrain elastic`` starts: on which hosts, and when they are restarted; with an ssh that stays
on this host."""

import os
import signal
import sys
import time

import pytest
from made_up_jobs import wait_until

from hvdtrain.fault_tolerance.elastic.host_list import HostList
from hvdtrain.fault_tolerance.elastic.workers import Worker, Workers
from hvdtrain.system.remote_process import start_remote


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """An ssh whose hosts are all this one, which notes its arguments."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\nfor last; do :; done\neval "exec $last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "arguments"


def test_a_remote_process_has_the_environment_and_the_folder(ssh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; print(os.environ['HVDTRAIN_X'], os.getcwd(), sys.argv[1], file=open('out', 'w')); exit(7)"
    env = {"HVDTRAIN_X": "it's $HOME \\ a=b", "TWO_LINES": "a\nb", "HVDTRAIN_ELASTIC_TOKEN": "secret"}
    process = start_remote("far", [sys.executable, "-c", code, "a 'b' $c"], env)
    assert process.wait(20) == 7
    assert (tmp_path / "out").read_text() == f"it's $HOME \\ a=b {tmp_path} a 'b' $c\n"
    assert "secret" not in ssh.read_text()


def test_a_remote_process_ends_with_its_connection(ssh, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = start_remote("far", [sys.executable, "-c", code], {})
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGSTOP)
    assert process.stdin is not None
    process.stdin.close()  # As sshd does when its connection ends.
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 137
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Recorded(Worker):
    """A worker that runs until it is told its exit code."""

    def __init__(self, number, host):
        super().__init__(number, host, ["true"], {})
        self.code: int | None = None

    is_running = False

    def start_if_due(self, now):
        self.is_running = self.is_running or (self.code is None and now >= self._start_at)

    def end(self, code):
        self.is_running, self.code = False, code

    def exit_code(self):
        return self.code

    def restart_later(self, now):
        self.code = None
        return super().restart_later(now)


@pytest.fixture
def made(ssh, tmp_path):
    """Workers on hosts of a file, of which there are three at most."""
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\nfar1 slots=1\n")
    found: list[Recorded] = []

    def make(number, host):
        found.append(Recorded(number, host))
        return found[-1]

    said: list[str] = []
    workers = Workers(make, HostList(None, file, here=0), 3, said.append)
    return workers, found, file, said


def test_workers_follow_the_hosts_of_a_file(made):
    workers, found, file, said = made
    assert [(each.number, each.host) for each in found] == [(0, None), (1, "far1")]
    workers.start_and_reap(0.0, has_trained=False)
    file.write_text("localhost slots=1\nfar1 slots=1\nfar2 slots=4\n")
    assert workers.follow_hosts(10.0) == []
    assert [each.host for each in found] == [None, "far1", "far2"]  # Three at most.
    workers.start_and_reap(10.0, has_trained=True)
    file.write_text("localhost slots=1\nfar2 slots=4\n")
    assert workers.follow_hosts(11.0) == []  # It is not read that often.
    assert workers.follow_hosts(20.0) == [1]
    assert [each.host for each in found[3:]] == ["far2"]  # In the place of the one that leaves.
    found[1].end(0)
    assert workers.start_and_reap(20.0, has_trained=True) is None
    assert len(workers) == 3
    file.write_text("one two three\n")
    assert workers.follow_hosts(30.0) == []
    assert "is ignored until it changes: hosts must have the form" in said[-1]
    assert len(workers) == 3


def test_a_worker_that_dies_is_started_again_after_growing_pauses(made):
    workers, found, _, said = made
    workers.start_and_reap(0.0, has_trained=False)
    for now, pause_s in ((10.0, 1), (20.0, 2), (30.0, 4)):
        found[1].end(-9)
        assert workers.start_and_reap(now, has_trained=True) is None
        assert said[-1] == f"a process on far1 ended with SIGKILL; restarting it in {pause_s} s"
        workers.start_and_reap(now + pause_s - 0.1, has_trained=True)
        assert not found[1].is_running
        workers.start_and_reap(now + pause_s, has_trained=True)
        assert found[1].is_running
    found[0].end(0)
    assert workers.start_and_reap(40.0, has_trained=True) is None
    assert len(workers) == 1


def test_a_worker_that_fails_before_training_ends_the_job(made):
    workers, found, _, _ = made
    workers.start_and_reap(0.0, has_trained=False)
    found[0].end(-9)
    assert workers.start_and_reap(1.0, has_trained=False) is None
    workers.start_and_reap(2.0, has_trained=False)
    assert found[0].is_running
    found[0].end(65)
    assert workers.start_and_reap(1.0, has_trained=False) == 65
    assert workers.start_and_reap(1.0, has_trained=True) is None
    assert len(workers) == 1  # A restart would fail again.


def test_killing_a_worker_kills_what_it_has_started(tmp_path):
    pid_file = tmp_path / "pid"
    worker = Worker(0, None, ["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], dict(os.environ))
    worker.start_if_due(time.monotonic())
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
    worker.kill()
    wait_until(lambda: worker.exit_code() == -signal.SIGKILL)
    wait_until(lambda: not _exists(int(pid_file.read_text())))


def _exists(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().split()[2] != "Z"
    except OSError:
        return False
