"""Whole jobs with local SGD: faults, and hosts with several ranks."""

import json
import re
import sys
from pathlib import Path

import pytest
from launcher import LONG, run_job
from test_faults import EVERY, STEPS, TRAIN, ended_in_time, flags, start, steps_of_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timed]

LOCAL = ["--mode", "local", "--sync-every", "6"]
OVERLAP = [*LOCAL, "--overlap"]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.long
def test_a_killed_rank_and_resuming(tmp_path):
    """Killed within a round, with a pending average; the last checkpoint is also from within a round."""
    uninterrupted = run_job([*TRAIN, *flags(tmp_path / "uninterrupted", *OVERLAP)], ranks=2, timeout_s=90)
    assert uninterrupted.code == 0, uninterrupted.output
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGKILL", more=OVERLAP)
    done = ended_in_time(job, mark)
    assert "rank 1" in done.messages[0], done.output
    again = run_job([*TRAIN, *flags(run_dir, *OVERLAP)], ranks=2, timeout_s=90)
    assert again.code == 0, again.output
    one, other = summary_of(tmp_path / "uninterrupted"), summary_of(run_dir)
    assert other["resumed_from"] == 40
    for name in ("weights_sha256", "loss", "metrics", "eval", "samples", "averaging_rounds", "average_late_steps"):
        assert one[name] == other[name], name


@pytest.mark.long
def test_a_non_finite_loss_on_one_rank_ends_the_job(tmp_path):
    job, mark = start(tmp_path / "run", "nan", variable=-1, more=OVERLAP)
    done = ended_in_time(job, mark)
    assert done.code == 1, done.output
    line = done.only_message
    assert re.search(r"rank 1 \(host .*\) failed at step \d+: NonFiniteError: .*At step 48: the loss on rank 1", line)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(LOCAL, id="waiting", marks=pytest.mark.long),
        pytest.param([*OVERLAP, "--on-nan", "ignore"], id="overlap"),
    ],
)
def test_a_non_finite_replica_ends_the_job_before_it_is_averaged(more, tmp_path):
    """It becomes non-finite after the last step of a round, so that no loss or gradient shows it before."""
    job, mark = start(tmp_path / "run", "nan", variable=0, after=True, more=more)
    done = ended_in_time(job, mark)
    assert done.code == 1, done.output
    line = done.only_message
    assert re.search(
        r"parameters must be finite to be averaged\. Received: 1 variable\(s\) of rank 1, 'digits/conv2d", line
    )


@pytest.mark.parametrize(
    ("fault", "launcher"),
    [("SIGTERM", "mpirun"), LONG("SIGTERM", "horovodrun --gloo"), LONG("SIGKILL", "mpirun")],
)
def test_a_wait_free_job_is_stopped_or_killed_and_resumes(fault, launcher, tmp_path):
    more = ["--mode", "local", "--sync-every", "5", "--wait-free"]
    run_dir = tmp_path / "run"
    # At the end of the first round after EVERY steps, whose number varies.
    checkpoint = run_dir / "checkpoints" / ("step-" + 8 * "?")
    # The steps of this rank: by then, the run has made more than EVERY.
    spec = {"step": 70, "checkpoint": str(checkpoint)} if fault == "SIGKILL" else {}
    job, _ = start(run_dir, fault, more=more, launcher=launcher, **spec)
    done = job.end(90)
    # horovodrun --gloo returns 1 for any failure.
    assert fault == "SIGKILL" or done.code == (75 if launcher == "mpirun" else 1), done.output
    saved = steps_of_checkpoints(run_dir)[-1]
    if fault == "SIGKILL":
        assert done.code != 0, done.output
        assert "lost connection to rank 1 (host " in done.messages[0], done.output
    # A stop is saved when it comes: the other rank may not have ended its first round.
    assert (EVERY if fault == "SIGKILL" else 0) <= saved < STEPS
    again = run_job([*TRAIN, *flags(run_dir, *more)], ranks=2, launcher=launcher, timeout_s=90)
    assert again.code == 0, again.output
    assert summary_of(run_dir)["resumed_from"] == saved
    assert summary_of(run_dir)["steps"] == STEPS


def test_ranks_of_a_host_average_their_gradients(tmp_path):
    """Two names of this machine count as two hosts."""
    run_dir = tmp_path / "run"
    hosts = ["horovodrun", "--gloo", "-H", "localhost:2,127.0.0.1:2", "-np", "4"]
    more = [*LOCAL, "--average-across", "host"]
    done = run_job(
        [*hosts, sys.executable, "-m", "hvdtrain", *flags(run_dir, *more)], ranks=4, launcher="", timeout_s=150
    )
    assert done.code == 0, done.output
    summary = summary_of(run_dir)
    assert (summary["hosts"], summary["ranks"]) == (2, 4)
    assert summary["averaging_rounds"] == 20
    assert summary["eval"]["accuracy"] > 0.9
