"""The doctor: this machine can run a job, and each finding has a remedy."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.commands.doctor import checks
from hvdtrain.commands.doctor.checks import Finding
from hvdtrain.system import network


def test_this_machine_can_run_a_job():
    done = subprocess.run([sys.executable, "-m", "hvdtrain", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for topic in (
        "tensorflow",
        "keras",
        "Horovod built with",
        "Horovod built for",
        "mpirun",
        "launcher",
        "GPUs",
        "cores",
    ):
        assert f"ok     {topic}" in done.stdout
    assert "OMPI_MCA_mpi_yield_when_idle=1" in done.stdout
    assert "1 MiB on 1 rank(s): correct" in done.stdout
    assert done.stdout.rstrip().endswith("A job can run here.")


def test_table_lists_remedies():
    text = checks.table([Finding("cores", "2"), Finding("mpirun", "not on PATH", "call through launch/run")])
    assert text.splitlines() == [
        "ok     cores   2",
        "WRONG  mpirun  not on PATH",
        "To fix: mpirun: call through launch/run",
    ]


def test_exception_in_a_check_is_a_finding():
    def broken() -> list[Finding]:
        raise OSError("libmpi.so.40: cannot open shared object file")

    (finding,) = checks.checked("Horovod", broken)
    assert "libmpi.so.40" in finding.state
    assert finding.remedy is not None


def test_mpirun_is_named_with_its_version(tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert checks.find_mpirun().state == f"mpirun (Open MPI) 5.0.11, {tmp_path / 'mpirun'}"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not on PATH" in checks.find_mpirun().state


def test_version_out_of_range_is_reported(monkeypatch):
    versions = {**checks.versions.versions(), "tensorflow": "2.15.1", "python": "3.9.1"}
    monkeypatch.setattr(checks.versions, "versions", lambda: versions)
    wrong = {finding.topic: finding.remedy for finding in checks.find_versions() if finding.remedy}
    assert wrong.keys() == {"tensorflow", "python"}
    assert wrong["tensorflow"].startswith("hvdtrain needs tensorflow")


class Hosts:
    """Two ranks on two hosts; the other host's facts are made up."""

    rank, size = 0, 2

    def __init__(self, **other):
        self._other = other

    def barrier(self):
        pass

    def allgather(self, value):
        return [
            value,
            value + self._other.get("seconds", 0.0) if isinstance(value, float) else {**value, **self._other},
        ]


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ({"host": "b"}, set()),
        ({"host": "b", "numpy": "1.0"}, {"numpy"}),
        ({"host": "b", "hvdtrain's code": "another"}, {"hvdtrain's code"}),
        ({"host": "b", "seconds": -3.0}, {"clocks"}),
    ],
)
def test_differing_hosts_are_reported(other, wrong, monkeypatch):
    from hvdtrain.commands.doctor import hosts

    monkeypatch.setattr(hosts.runtime, "current", lambda: SimpleNamespace(collectives=Hosts(**other)))
    findings, table = hosts.compare()
    assert {finding.topic for finding in findings} == wrong
    assert all(finding.remedy for finding in findings)
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert rows["host"].split() == ["host", network.host_name(), "b"]
    assert rows["ranks"].split() == ["ranks", "1", "1"]
    assert "GPUs" in rows
    if "numpy" in wrong:
        assert " 1.0 on b" in findings[0].state


class Links:
    """Two ranks; each allreduce takes 10 ms, in which this one's process is busy for ``busy_s``, the other's twice."""

    def __init__(self, busy_s=0.0, *, cross_size=2, is_mpi=True):
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self.cross_size = cross_size
        self._busy_s, self._is_mpi = busy_s, is_mpi

    def barrier(self):
        pass

    def sum(self, values):
        self.seconds += 0.01
        self.cpu_seconds += self._busy_s

    def allgather(self, value):
        return [value, 2 * value]

    def mpi_sum(self, array):
        return array if self._is_mpi else None


def test_cores_that_waiting_takes(monkeypatch):
    from hvdtrain.commands.doctor import waiting

    links = Links(busy_s=0.004)
    clock = SimpleNamespace(perf_counter=lambda: links.seconds, process_time=lambda: links.cpu_seconds)
    monkeypatch.setattr(waiting, "time", clock)
    assert waiting.busy_cores(links) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("cores", "links", "polls"),
    [
        (0.98, Links(), True),
        (0.98, Links(cross_size=1), False),
        (0.98, Links(is_mpi=False), False),
        (0.19, Links(), False),
    ],
)
def test_polling_between_hosts_is_reported(cores, links, polls):
    from hvdtrain.commands.doctor import waiting

    line = waiting.advice(cores, links)
    assert (line is not None) == polls
    if line is not None:
        assert line.startswith("MPI polls: each rank keeps 0.98 cores busy while an allreduce travels.")
        assert "horovodrun --gloo" in line


def test_a_setting_that_shortens_steps_on_a_cpu_is_named():
    assert checks.find_onednn(0, is_used=True) == checks.find_onednn(1, is_used=False) == []
    (finding,) = checks.find_onednn(0, is_used=False)
    assert "TF_ENABLE_ONEDNN_OPTS=1" in finding.state
    assert finding.remedy is None
