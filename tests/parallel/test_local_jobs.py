"""Whole jobs in local mode: what strikes them, and hosts with several ranks."""

import json
import re
import sys
from pathlib import Path

import pytest
from launcher import LONG, run_job
from test_faults import TRAIN, ended_in_time, flags, start, steps_of_checkpoints

AT_ONCE = ["--mode", "local", "--average-every", "6"]
LOCAL = [*AT_ONCE, "--overlap"]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def test_a_killed_rank_and_going_on(tmp_path):
    """In the middle of a round, with an average on its way, after a checkpoint that was in the middle of one."""
    untouched = run_job([*TRAIN, *flags(tmp_path / "untouched", *LOCAL)], ranks=2, timeout_s=90)
    assert untouched.code == 0, untouched.output
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGKILL", more=LOCAL)
    done = ended_in_time(job, mark)
    assert "rank 1" in done.told[0], done.output
    again = run_job([*TRAIN, *flags(run_dir, *LOCAL)], ranks=2, timeout_s=90)
    assert again.code == 0, again.output
    one, other = summary_of(tmp_path / "untouched"), summary_of(run_dir)
    assert other["resumed_from"] == 40
    for name in ("weights_sha256", "loss", "metrics", "eval", "samples", "averaging_rounds", "average_late_steps"):
        assert one[name] == other[name], name


def test_a_loss_of_one_rank_that_is_not_finite_ends_the_job(tmp_path):
    job, mark = start(tmp_path / "run", "nan", variable=-1, more=LOCAL)
    done = ended_in_time(job, mark)
    assert done.code == 1, done.output
    line = done.only_line_told
    assert re.search(r"rank 1 \(host .*\) failed at step \d+: NonFiniteError: .*At step 48: the loss on rank 1", line)


def test_a_replica_that_is_not_finite_spoils_no_other(tmp_path):
    """It becomes so after the last step of a round: neither loss nor gradient shows it before the average."""
    job, mark = start(tmp_path / "run", "nan", variable=0, after=True, more=AT_ONCE)
    done = ended_in_time(job, mark)
    assert done.code == 1, done.output
    line = done.only_line_told
    assert re.search(
        r"parameters must be finite to be averaged\. Received: 1 variable\(s\) of rank 1, 'digits/conv2d", line
    )


@pytest.mark.parametrize("launcher", ["mpirun", LONG("horovodrun --gloo")])
def test_a_wait_free_job_stops_and_goes_on(launcher, tmp_path):
    more = ["--mode", "local", "--average-every", "5", "--wait-free"]
    run_dir = tmp_path / "run"
    job, _ = start(run_dir, "SIGTERM", more=more, launcher=launcher)
    done = job.end(90)
    # horovodrun --gloo makes 1 of any failure.
    assert done.code == (75 if launcher == "mpirun" else 1), done.output
    saved = steps_of_checkpoints(run_dir)[-1]
    assert saved < 120
    again = run_job([*TRAIN, *flags(run_dir, *more)], ranks=2, launcher=launcher, timeout_s=90)
    assert again.code == 0, again.output
    assert summary_of(run_dir)["resumed_from"] == saved
    assert summary_of(run_dir)["steps"] == 120


def test_ranks_of_a_host_average_their_gradients(tmp_path):
    """Two names of this machine pass for two hosts."""
    run_dir = tmp_path / "run"
    hosts = ["horovodrun", "--gloo", "-H", "localhost:2,127.0.0.1:2", "-np", "4"]
    more = ["--mode", "local", "--average-every", "6", "--average-across", "host"]
    done = run_job(
        [*hosts, sys.executable, "-m", "hvdtrain", *flags(run_dir, *more)], ranks=4, launcher="", timeout_s=150
    )
    assert done.code == 0, done.output
    summary = summary_of(run_dir)
    assert (summary["hosts"], summary["ranks"]) == (2, 4)
    assert summary["averaging_rounds"] == 20
    assert summary["eval"]["accuracy"] > 0.9
