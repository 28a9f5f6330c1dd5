"""launch/slurm.sbatch on a real two-node Slurm: stops before the limit, requeues itself, resumes bit-identically."""

import json
import sys
import time
from pathlib import Path

import laboratory
import pytest
from laboratory import Laboratory
from launcher import ROOT, TESTS, Job, run_job
from slurm import Slurm, missing

lacks = [*laboratory.missing(), *missing()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.lab,
    pytest.mark.skipif(bool(lacks), reason=f"Slurm in a lab needs {', '.join(lacks)}"),
]

OPTIONS = ["--deterministic", "--checkpoint-every", "0", "--log-every", "50", "--eval-every", "5000"]
TASKS = ["--nodes=2", "--ntasks-per-node=1"]
TASK = TESTS / "elastic_task.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with Laboratory(2) as lab, Slurm(lab, folder) as slurm:
        yield lab, slurm


def summary(lab: Laboratory, run_dir: str) -> dict:
    return json.loads(lab.path("lab1", f"{run_dir}/summary.json").read_text())


def uninterrupted_run(lab: Laboratory, steps: int, timeout_s: float = 200) -> dict:
    """The summary of an uninterrupted run."""
    run_dir = f"/mnt/uninterrupted-{steps}"
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--steps", str(steps), "--run-dir", run_dir]
    command = [str(ROOT / "launch" / "mpirun.sh"), "-H", lab.slots(), *train]
    done = run_job(lab.command("lab1", command), ranks=2, launcher="", timeout_s=timeout_s)
    assert done.code == 0, done.output
    return summary(lab, run_dir)


def submit(slurm: Slurm, output: Path, run_dir: str, steps: int, *more: str) -> str:
    """Submits a job and returns its id."""
    script = [str(ROOT / "launch" / "slurm.sbatch"), *OPTIONS, "--steps", str(steps), "--run-dir", run_dir]
    return slurm.ask("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", *TASKS, *more, *script)


def output_when_completed(slurm: Slurm, job: str, output: Path, timeout_s: float) -> str:
    """Waits until a job has completed and returns its output."""
    deadline_s = time.monotonic() + timeout_s
    waited = 0
    while (state := slurm.state(job)) != "COMPLETED":
        output_text = output.read_text() if output.exists() else ""
        assert state in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"), (state, output_text)
        assert time.monotonic() < deadline_s, (state, output_text)
        again = state == "PENDING" and "Restarts=0" not in slurm.ask("scontrol", "show", "job", job)
        waited = waited + 1 if again else 0
        if waited == 20:
            # Slurm waits two minutes before it restarts a job. Ten seconds suffice for it to register the end of the
            # script; if restarted earlier, that end would be taken for the end of the new one.
            slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)
    return output.read_text()


def test_stopped_job_saves_requeues_and_resumes(cluster, tmp_path):
    lab, slurm = cluster
    expected = uninterrupted_run(lab, 600)
    output = tmp_path / "output"
    job = submit(slurm, output, "/mnt/stopped", 600)
    while not (output.exists() and "step 50 " in output.read_text()):
        assert slurm.state(job) in ("PENDING", "RUNNING"), output.read_text()
        time.sleep(0.1)
    # What Slurm sends before the time limit.
    slurm.ask("scancel", "--signal=TERM", "--batch", job)
    output_text = output_when_completed(slurm, job, output, 150)
    assert "ranks: 2 on 2 host(s)" in output_text, output_text
    assert "allocated by Slurm" in output_text, output_text
    assert f"checkpoint saved; requeueing job {job}" in output_text, output_text
    found = summary(lab, "/mnt/stopped")
    assert 50 <= found["resumed_from"] < 600
    assert found["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.long
def test_time_limit(cluster, tmp_path):
    """A limit of two minutes for a longer job; Slurm may signal up to a minute early."""
    lab, slurm = cluster
    expected = uninterrupted_run(lab, 5000, timeout_s=400)
    assert expected["wall_seconds"] > 110, "too few steps for this machine: the job would not meet its limit"
    output = tmp_path / "output"
    job = submit(slurm, output, "/mnt/limit", 5000, "--time=2", "--signal=B:TERM@15")
    output_text = output_when_completed(slurm, job, output, 1200)
    assert f"checkpoint saved; requeueing job {job}" in output_text, output_text
    assert summary(lab, "/mnt/limit")["weights_sha256"] == expected["weights_sha256"]


def test_exit_code_is_that_of_the_job(cluster, tmp_path):
    _, slurm = cluster
    output = tmp_path / "output"
    job = submit(slurm, output, "/mnt/wrong", -1)
    deadline_s = time.monotonic() + 60
    while slurm.state(job) in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline_s, output.read_text()
        time.sleep(0.5)
    assert "ExitCode=64:0" in slurm.ask("scontrol", "show", "job", job), output.read_text()
    assert "--steps" in output.read_text()


@pytest.mark.long
def test_members_of_an_elastic_job_leave_and_join(cluster, tmp_path, monkeypatch):
    """Each member is a Slurm job; one of them is cancelled with SIGTERM, as by preemption, and submitted again."""
    lab, slurm = cluster
    monkeypatch.setenv("HVDTRAIN_ELASTIC_TOKEN", "secret")
    monkeypatch.setenv("HVDTRAIN_TEST_STEP_S", "0.05")
    address = lab.address("lab1")
    elastic = ["elastic", "1:2", "--np", "0", "--address", address, "--port", "29400"]
    coordinator = Job(lab.command("lab1", [sys.executable, "-m", "hvdtrain", *elastic]), ranks=0, launcher="")
    run_dir = tmp_path / "run"
    options = ["--task", str(TASK), "--steps", "900", "--run-dir", str(run_dir), "--global-batch-size", "48"]

    def submit_member(number: int) -> str:
        script = [str(ROOT / "launch" / "slurm-elastic.sbatch"), f"{address}:29400", *options]
        where = [f"--nodelist=lab{number}", "--cpus-per-task=1", f"--output={tmp_path / 'member'}-%j"]
        return slurm.ask("sbatch", "--parsable", f"--chdir={ROOT}", *where, *script)

    try:
        submit_member(1)
        coordinator.wait_for("generation 1: 1 rank(s)")
        second = submit_member(2)
        coordinator.wait_for("2 rank(s), 1 of them new")
        slurm.ask("scancel", "--signal=TERM", second)
        coordinator.wait_for("leaves: SIGTERM on host lab2")
        submit_member(2)
        coordinator.wait_for("generation 4: 2 rank(s), 1 of them new")
        done = coordinator.end(120)
    finally:
        coordinator.kill()
    assert done.code == 0, done.output
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 900


def test_srun_starts_ranks_itself(cluster):
    """Requires a PMIx of Slurm that is compatible with Open MPI's."""
    lab, slurm = cluster
    train = [sys.executable, "-m", "hvdtrain", *OPTIONS, "--steps", "40", "--run-dir", "/mnt/srun"]
    output_text = slurm.ask("srun", "--mpi=pmix", *TASKS, *train)
    if "can not load PMIx library" in output_text:
        pytest.skip("Slurm's PMIx needs Debian's libpmix-dev")
    assert "ranks: 2 on 2 host(s)" in output_text, output_text
    assert summary(lab, "/mnt/srun")["ranks"] == 2
