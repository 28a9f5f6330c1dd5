"""One short launched job of each kind, for the quick tier; the other files of this folder are slow."""

import json
import re
import sys
from pathlib import Path

from launcher import Finished, Job, kill_rank_1_after_a_checkpoint, run_job

from hvdtrain.system.json_files import read_lines

TRAIN = [sys.executable, "-m", "hvdtrain"]


def summary_of(job: Finished, run_dir: Path) -> dict:
    assert job.code == 0, job.output
    return json.loads((run_dir / "summary.json").read_text())


def log_lines(job: Finished, run_dir: Path) -> tuple[list[int], list[int]]:
    """The steps of the log lines on the console, and of those in metrics.jsonl."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shown = [int(step) for step in re.findall(r":\d\d  step (\d+)  loss ", job.output)]
    return shown, [event["step"] for event in events if event["event"] == "train"]


def test_synchronous_training_under_horovodrun(tmp_path):
    command = [*TRAIN, "--epochs", "6", "--run-dir", str(tmp_path)]
    job = run_job(command, ranks=2, launcher="horovodrun", timeout_s=120)
    summary = summary_of(job, tmp_path)
    assert (summary["ranks"], summary["mode"]) == (2, "sync")
    assert summary["eval"]["accuracy"] >= 0.9
    assert "weights: equal on all ranks" in job.output
    shown, logged = log_lines(job, tmp_path)
    assert logged == [*range(10, 131, 10), 138]
    assert [shown[0], shown[-1]] == [10, 138]
    assert len(shown) < len(logged), "about one line a second unless --log-every is set"


def test_local_sgd(tmp_path):
    command = [*TRAIN, "--mode", "local", "--sync-every", "8", "--overlap", "--epochs", "6", "--run-dir", str(tmp_path)]
    job = run_job([*command, "--log-every", "5"], ranks=2, timeout_s=120)
    summary = summary_of(job, tmp_path)
    shown, logged = log_lines(job, tmp_path)
    assert shown == logged == [*range(5, 136, 5), 138]
    assert summary["mode"] == "local"
    assert summary["averaging_rounds"] >= 6 * 23 // 8
    assert summary["eval"]["accuracy"] >= 0.9


def test_a_killed_rank_ends_the_job_and_the_run_resumes(tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    command = [*TRAIN, "--deterministic", "--steps", "60", "--checkpoint-every", "10"]
    expected = summary_of(run_job([*command, "--run-dir", str(uninterrupted)], ranks=2, timeout_s=120), uninterrupted)
    # Not the line of the last checkpoint, which is written when the run's time is taken.
    last = [each for each in read_lines(uninterrupted / "metrics.jsonl") if each["event"] == "train"][-1]
    assert (last["samples"], last["epoch"]) == (expected["samples"], expected["epochs"])
    assert expected["samples"] == 2 * 1437 + 14 * 64
    assert 0 < last["elapsed_seconds"] <= expected["wall_seconds"]
    job = Job([*command, "--run-dir", str(killed)], ranks=2)
    kill_rank_1_after_a_checkpoint(job, killed)
    found = summary_of(run_job([*command, "--run-dir", str(killed)], ranks=2, timeout_s=120), killed)
    assert found["resumed_from"] in range(10, 60)
    assert found["weights_sha256"] == expected["weights_sha256"]
    values = [
        [(each["step"], each["samples"], each["loss"]) for each in read_lines(run / "metrics.jsonl") if "loss" in each]
        for run in (uninterrupted, killed)
    ]
    assert values[0] == values[1]
