"""Whole jobs with backup workers or balanced ranks: they are killed or stopped, and resume."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from contributions import samples_of_updates
from launcher import LONG, Job, kill_rank_1_after_a_checkpoint, run_commands, run_job
from test_faults import FAULTY, start, steps_of_checkpoints

from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.training.quorum.contributions import read_contributions

pytestmark = pytest.mark.slow

STEPS, EVERY, FAULT_STEP = 60, 20, 27
NUM_SAMPLES, BATCH_SIZE = 1437, 32  # of the digits task, which is trained on
OPTIONS = ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
TRAIN = [sys.executable, "-m", "hvdtrain", "--quorum", "1", "--step-grace", "1", "--deterministic", "--steps", "60"]
# Each closes most updates with one rank.
QUORUM = [*OPTIONS, "--deterministic", "--quorum", "1", "--step-grace", "0"]
DEADLINE = [*OPTIONS, "--deterministic", "--quorum", "2", "--step-deadline", "0.001"]
REPLAY = [*OPTIONS, "--deterministic", "--quorum", "2", "--replay"]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def ended(run_dir: Path, fault: str, *options: str, **spec) -> int:
    """Trains until a rank is killed or stopped; returns the step from which the run will resume."""
    checkpoint = run_dir / "checkpoints" / f"step-{EVERY:08d}"
    job, _ = start(run_dir, fault, step=FAULT_STEP, checkpoint=str(checkpoint), options=options, **spec)
    done = job.end(180)
    if fault == "SIGTERM":
        assert done.code == 75, done.output
        (_, step) = steps_of_checkpoints(run_dir)
        assert FAULT_STEP <= step < STEPS
        return step
    assert done.code not in (0, 75), done.output
    assert "lost connection to rank 1 (host " in done.messages[0], done.output
    assert steps_of_checkpoints(run_dir) == [EVERY]
    return EVERY


@pytest.mark.parametrize(
    ("fault", "options"),
    [("SIGTERM", QUORUM), LONG("SIGKILL", QUORUM), LONG("SIGTERM", DEADLINE), LONG("SIGKILL", DEADLINE)],
    ids=["SIGTERM-quorum", "SIGKILL-quorum", "SIGTERM-deadline", "SIGKILL-deadline"],
)
def test_a_run_with_a_quorum_resumes_and_uses_each_sample_once_an_epoch(fault, options, tmp_path):
    """What it has recorded, over both jobs, is an uninterrupted run: a replay of it is bit-identical."""
    run_dir, replayed, record = tmp_path / "run", tmp_path / "replayed", tmp_path / "contributions.jsonl"
    step = ended(run_dir, fault, *options, "--record", str(record))
    lines = [
        [*options, "--record", record, "--run-dir", run_dir],
        [*REPLAY, record, "--run-dir", replayed],
    ]
    for done in run_commands(lines, ranks=2, folder=tmp_path / "output", timeout_s=240):
        assert done.code == 0, done.output
    found, expected = summary_of(run_dir), summary_of(replayed)
    assert found["resumed_from"] == step
    for name in ("weights_sha256", "loss", "metrics", "eval", "steps", "updates", "samples", "effective_batch"):
        assert found[name] == expected[name], name
    contributions = read_contributions(str(record), 2)
    assert found["updates"] == len(contributions) > found["steps"] == STEPS
    drawn = np.concatenate(
        samples_of_updates(contributions, SamplePlan(num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE, size=2))
    )
    assert found["samples"] == len(drawn)
    for first in range(0, len(drawn), NUM_SAMPLES):
        epoch = drawn[first : first + NUM_SAMPLES]
        assert len(np.unique(epoch)) == len(epoch)


BALANCED = [*OPTIONS, "--threads", "1", "--balance", "--balance-every", "8"]
SPEEDS = [100, 300]


def balanced_run(run_dir: Path) -> dict:
    """Trains with ranks of these speeds to the end; returns the summary."""
    spec = {"fault": "none", "ranks": [], "speeds": SPEEDS}
    done = run_job([*FAULTY, json.dumps(spec), *BALANCED, "--run-dir", str(run_dir)], ranks=2, timeout_s=180)
    assert done.code == 0, done.output
    return summary_of(run_dir)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory) -> dict:
    """The summary of an uninterrupted run with ranks of different speed."""
    return balanced_run(tmp_path_factory.mktemp("balanced") / "run")


@pytest.mark.long
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM"])
def test_a_balanced_run_resumes_bit_identically_if_speeds_are_the_same(fault, balanced, tmp_path):
    """It resumes with the division of samples that its checkpoint has: with another one, rounding differs."""
    run_dir = tmp_path / "run"
    step = ended(run_dir, fault, *BALANCED, speeds=SPEEDS)
    summary = balanced_run(run_dir)
    assert summary["resumed_from"] == step
    assert summary["rank_batch_sizes"] == [16, 48]
    for name in ("weights_sha256", "loss", "metrics", "eval", "steps", "samples", "batch_size_changes"):
        assert summary[name] == balanced[name], name


@pytest.mark.long
def test_a_killed_replay_resumes(tmp_path):
    """The resumed run repeats what contributed in an uninterrupted one, and ends with the same weights."""
    first, killed = tmp_path / "first", tmp_path / "killed"
    record = str(tmp_path / "contributions.jsonl")
    done = run_job([*TRAIN, "--record", record, "--run-dir", str(first)], ranks=2, timeout_s=240)
    assert done.code == 0, done.output
    assert "effective batch" in done.output
    again = ["--replay", record, "--record", str(tmp_path / "again.jsonl"), "--checkpoint-every", "10"]
    command = [*TRAIN, *again, "--run-dir", str(killed)]
    job = Job(command, ranks=2)
    kill_rank_1_after_a_checkpoint(job, killed)
    done = run_job(command, ranks=2, timeout_s=240)
    assert done.code == 0, done.output
    expected, found = (json.loads((run / "summary.json").read_text()) for run in (first, killed))
    assert found["resumed_from"] in range(10, 60)
    for name in ("weights_sha256", "loss", "eval", "updates", "samples", "effective_batch", "missed_updates"):
        assert found[name] == expected[name], name
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "contributions.jsonl").read_text()
    logged = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert all(each["effective_batch"] <= 64 for each in logged if each["event"] == "train")
