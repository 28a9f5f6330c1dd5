"""An elastic job on two lab hosts: started by ssh, a killed rank, a changed hosts file, and a host that is cut off."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest
from elastic_runs import GLOBAL_BATCH, TRAIN, assert_equal_runs, train_alone
from laboratory import Laboratory, missing
from launcher import Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.lab,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

STALL_S = 10.0
STEPS = 800


def rank_processes(job: Job, host: str) -> list[int]:
    """The training processes of the job on a host."""
    found = []
    for pid, environment in job.processes().items():
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            is_python = "python" in Path(f"/proc/{pid}/comm").read_text()
            is_there = os.readlink(f"/proc/{pid}/ns/net") == namespace(host)
            if "HVDTRAIN_ELASTIC_WORKER" in environment and is_python and is_there:
                found.append(pid)
    return found


def namespace(host: str) -> str:
    return f"net:[{os.stat(f'/run/netns/{host}').st_ino}]"


def test_ranks_are_lost_added_and_cut_off(tmp_path):
    run_dir, hostfile = tmp_path / "run", tmp_path / "hosts"
    hostfile.write_text("lab1 slots=1\nlab2 slots=1\n")
    elastic = [sys.executable, "-m", "hvdtrain", "elastic", "1:3", "--hostfile", str(hostfile), "--env", "MY_NAME"]
    options = ["--run-dir", str(run_dir), "--log-every", "20", "--steps", str(STEPS), "--stall-timeout", str(STALL_S)]
    options += ["--global-batch-size", str(GLOBAL_BATCH)]
    with Laboratory(2) as lab:
        variables = ["MY_NAME=x", "HVDTRAIN_ELASTIC_TOKEN=hunter2", "HVDTRAIN_TEST_STEP_S=0.05"]
        job = Job(lab.command("lab1", ["env", *variables, *elastic, *TRAIN, *options]), ranks=0, launcher="")
        try:
            job.wait_for("generation 1: 2 rank(s)")
            lines = {path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
            assert not any(b"hunter2" in line for line in lines if b"MY_NAME=x" not in line)
            until_s = time.monotonic() + 60
            while (
                not list((run_dir / "metrics.jsonl").parent.glob("metrics.jsonl"))
                or '"train"' not in (run_dir / "metrics.jsonl").read_text()
            ):
                assert time.monotonic() < until_s, job.output
                time.sleep(0.1)
            (victim,) = rank_processes(job, "lab2")
            os.kill(victim, 9)
            job.wait_for("lost rank 1 (host lab2")
            job.wait_for("generation 3: 2 rank(s), 1 of them new")
            hostfile.write_text("lab1 slots=1\nlab2 slots=2\n")
            job.wait_for("generation 4: 3 rank(s), 1 of them new")
            hostfile.write_text("lab1 slots=1\nlab2 slots=1\n")
            job.wait_for("leaves: its host was taken from the job")
            job.wait_for("generation 5: 2 rank(s)")
            # Ranks that still connect would return only after Gloo's timeouts.
            until_s = time.monotonic() + 60
            while job.output.count("2 rank(s) from now on") < 2:
                assert time.monotonic() < until_s, job.output
                time.sleep(0.1)
            lab.cut("lab2")
            cut_s = time.monotonic()
            job.wait_for("generation 6: 1 rank(s)", STALL_S + 5)
            while rank_processes(job, "lab2"):
                assert time.monotonic() < cut_s + STALL_S + 10
                time.sleep(0.1)
            lab.restore("lab2")
            job.wait_for("generation 7: 2 rank(s), 1 of them new")
            done = job.end(120)
            assert done.code == 0, done.output
            assert job.processes() == {}
        finally:
            job.kill()
    assert_equal_runs(run_dir, train_alone(tmp_path / "one", STEPS))
