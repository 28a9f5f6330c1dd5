"""Whole jobs with backup workers: a killed rank, and what the run directory shows."""

import json
import os
import signal
import sys
import time

import pytest
from launcher import Job, run_job

pytestmark = [pytest.mark.slow, pytest.mark.long]

TRAIN = [sys.executable, "-m", "hvdtrain", "--quorum", "1", "--step-grace", "1", "--deterministic", "--steps", "60"]


def test_a_killed_rank_ends_the_job_and_the_run_resumes(tmp_path):
    """The resumed run repeats what contributed in an uninterrupted one, and ends with the same weights."""
    first, killed = tmp_path / "first", tmp_path / "killed"
    record = str(tmp_path / "contributions.jsonl")
    done = run_job([*TRAIN, "--record", record, "--run-dir", str(first)], ranks=2, timeout_s=120)
    assert done.code == 0, done.output
    assert "effective batch" in done.output
    again = ["--replay", record, "--record", str(tmp_path / "again.jsonl"), "--checkpoint-every", "10"]
    command = [*TRAIN, *again, "--run-dir", str(killed)]
    job = Job(command, ranks=2)
    deadline_s = time.monotonic() + 60
    while not list((killed / "checkpoints").glob("step-*")):
        assert job.is_running
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(job.rank(1), signal.SIGKILL)
    ended = job.end(60)
    assert ended.code != 0
    assert "lost connection to rank 1 (host " in ended.only_message
    done = run_job(command, ranks=2, timeout_s=120)
    assert done.code == 0, done.output
    expected, found = (json.loads((run / "summary.json").read_text()) for run in (first, killed))
    assert found["resumed_from"] in range(10, 60)
    for name in ("weights_sha256", "loss", "eval", "updates", "samples", "effective_batch", "missed_updates"):
        assert found[name] == expected[name], name
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "contributions.jsonl").read_text()
    logged = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert all(each["effective_batch"] <= 64 for each in logged if each["event"] == "train")
