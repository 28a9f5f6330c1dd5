"""One short launched job of each kind, for the quick tier; the other files of this folder are slow."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from launcher import Finished, Job, run_job

TRAIN = [sys.executable, "-m", "hvdtrain"]


def summary_of(job: Finished, run_dir: Path) -> dict:
    assert job.code == 0, job.output
    return json.loads((run_dir / "summary.json").read_text())


def test_synchronous_training_under_horovodrun(tmp_path):
    command = [*TRAIN, "--epochs", "6", "--run-dir", str(tmp_path)]
    job = run_job(command, ranks=2, launcher="horovodrun", timeout_s=120)
    summary = summary_of(job, tmp_path)
    assert (summary["ranks"], summary["mode"]) == (2, "sync")
    assert summary["eval"]["accuracy"] >= 0.9
    assert f"weights_sha256: {summary['weights_sha256']} (equal on all ranks)" in job.output


def test_local_sgd(tmp_path):
    command = [*TRAIN, "--mode", "local", "--sync-every", "8", "--overlap", "--epochs", "6", "--run-dir", str(tmp_path)]
    summary = summary_of(run_job(command, ranks=2, timeout_s=120), tmp_path)
    assert summary["mode"] == "local"
    assert summary["averaging_rounds"] >= 6 * 23 // 8
    assert summary["eval"]["accuracy"] >= 0.9


def test_a_killed_rank_ends_the_job_and_the_run_resumes(tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    command = [*TRAIN, "--deterministic", "--steps", "60", "--checkpoint-every", "10"]
    expected = summary_of(run_job([*command, "--run-dir", str(uninterrupted)], ranks=2, timeout_s=120), uninterrupted)
    job = Job([*command, "--run-dir", str(killed)], ranks=2)
    deadline_s = time.monotonic() + 60
    while not list((killed / "checkpoints").glob("step-*")):
        assert job.is_running
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(job.rank(1), signal.SIGKILL)
    ended = job.end(60)
    assert ended.code != 0
    assert "lost connection to rank 1 (host " in ended.only_message
    found = summary_of(run_job([*command, "--run-dir", str(killed)], ranks=2, timeout_s=120), killed)
    assert found["resumed_from"] in range(10, 60)
    assert found["weights_sha256"] == expected["weights_sha256"]
