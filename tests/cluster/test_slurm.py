"""launch/slurm.sbatch in a real Slurm of two nodes: trained, stopped before the limit, queued again, and exact."""

import json
import sys
import time
from pathlib import Path

import laboratory
import pytest
from laboratory import Laboratory
from launcher import ROOT, run_job
from slurm import Slurm, missing

lacks = [*laboratory.missing(), *missing()]
pytestmark = pytest.mark.skipif(bool(lacks), reason=f"a Slurm in a laboratory needs {', '.join(lacks)}")

OPTIONS = ["--deterministic", "--checkpoint-every", "0", "--log-every", "50", "--eval-every", "5000"]
TASKS = ["--nodes=2", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    place = tmp_path_factory.mktemp("slurm")
    with Laboratory(2) as lab, Slurm(lab, place) as slurm:
        yield lab, slurm


def summary(lab: Laboratory, run_dir: str) -> dict:
    return json.loads(lab.path("lab1", f"{run_dir}/summary.json").read_text())


def straight(lab: Laboratory, steps: int, timeout_s: float = 200) -> dict:
    """The summary of a run that nothing happens to."""
    run_dir = f"/mnt/straight-{steps}"
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--steps", str(steps), "--run-dir", run_dir]
    command = [str(ROOT / "launch" / "mpirun.sh"), "-H", lab.slots(), *train]
    done = run_job(lab.command("lab1", command), ranks=2, launcher="", timeout_s=timeout_s)
    assert done.code == 0, done.output
    return summary(lab, run_dir)


def submitted(slurm: Slurm, output: Path, run_dir: str, steps: int, *more: str) -> str:
    """The number of a job."""
    script = [str(ROOT / "launch" / "slurm.sbatch"), *OPTIONS, "--steps", str(steps), "--run-dir", run_dir]
    return slurm.ask("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", *TASKS, *more, *script)


def completed(slurm: Slurm, job: str, output: Path, timeout_s: float) -> str:
    """What a job has said until its end."""
    deadline_s = time.monotonic() + timeout_s
    waited = 0
    while (state := slurm.state(job)) != "COMPLETED":
        told = output.read_text() if output.exists() else ""
        assert state in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"), (state, told)
        assert time.monotonic() < deadline_s, (state, told)
        again = state == "PENDING" and "Restarts=0" not in slurm.ask("scontrol", "show", "job", job)
        waited = waited + 1 if again else 0
        if waited == 20:
            # Slurm lets two minutes pass before it starts a job anew. Ten seconds are enough for the end of the script
            # to be known: it would be taken for the end of the new one.
            slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)
    return output.read_text()


def test_stopped_saved_queued_again(cluster, tmp_path):
    lab, slurm = cluster
    expected = straight(lab, 600)
    output = tmp_path / "output"
    job = submitted(slurm, output, "/mnt/stopped", 600)
    while not (output.exists() and "step 50 " in output.read_text()):
        assert slurm.state(job) in ("PENDING", "RUNNING"), output.read_text()
        time.sleep(0.1)
    # As Slurm does before the time limit.
    slurm.ask("scancel", "--signal=TERM", "--batch", job)
    told = completed(slurm, job, output, 150)
    assert "ranks: 2 on 2 host(s)" in told, told
    assert "which Slurm has given" in told, told
    assert f"saved; job {job} is queued again" in told, told
    found = summary(lab, "/mnt/stopped")
    assert 50 <= found["resumed_from"] < 600
    assert found["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.long
def test_the_time_limit(cluster, tmp_path):
    """Two minutes for a job that takes longer; Slurm may signal a minute earlier than it was told."""
    lab, slurm = cluster
    expected = straight(lab, 5000, timeout_s=400)
    assert expected["wall_seconds"] > 110, "too few steps for this machine: the job would not meet its limit"
    output = tmp_path / "output"
    job = submitted(slurm, output, "/mnt/limit", 5000, "--time=2", "--signal=B:TERM@15")
    told = completed(slurm, job, output, 1200)
    assert f"saved; job {job} is queued again" in told, told
    assert summary(lab, "/mnt/limit")["weights_sha256"] == expected["weights_sha256"]


def test_an_exit_code_is_the_jobs(cluster, tmp_path):
    _, slurm = cluster
    output = tmp_path / "output"
    job = submitted(slurm, output, "/mnt/wrong", -1)
    deadline_s = time.monotonic() + 60
    while slurm.state(job) in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline_s, output.read_text()
        time.sleep(0.5)
    assert "ExitCode=64:0" in slurm.ask("scontrol", "show", "job", job), output.read_text()
    assert "--steps" in output.read_text()


def test_srun_starts_ranks_itself(cluster):
    """Where Slurm's PMIx fits that of Open MPI."""
    lab, slurm = cluster
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--steps", "40", "--run-dir", "/mnt/srun"]
    told = slurm.ask("srun", "--mpi=pmix", *TASKS, *train)
    if "can not load PMIx library" in told:
        pytest.skip("Slurm's PMIx needs Debian's libpmix-dev")
    assert "ranks: 2 on 2 host(s)" in told, told
    assert summary(lab, "/mnt/srun")["ranks"] == 2
