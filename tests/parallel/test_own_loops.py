"""Loops of users that one rank leaves before the others, or that it delays: a message names the rank and its step."""

import re
import sys
from pathlib import Path

import pytest
from launcher import LONG, Finished, run_job

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("ending_loop.py")


def end_of(how: str, reduced_by: str, *, ranks: int = 2, launcher: str = "mpirun") -> Finished:
    command = ["env", "HOROVOD_STALL_CHECK_TIME_SECONDS=3", sys.executable, str(PROGRAM), how, reduced_by]
    done = run_job(command, ranks=ranks, launcher=launcher, timeout_s=90)
    # It would convert the code of hvdtrain, and warns where it cannot.
    assert "AutoGraph" not in done.output
    return done


@pytest.mark.parametrize(
    ("how", "reduced_by", "ranks", "launcher"),
    [
        ("leaves", "optimizer", 3, "mpirun"),
        LONG("exits", "tape", 2, "horovodrun"),
        LONG("leaves", "tape", 2, "horovodrun --gloo"),
    ],
)
def test_a_rank_that_ends_early_is_named_instead_of_horovods_error(how, reduced_by, ranks, launcher):
    done = end_of(how, reduced_by, ranks=ranks, launcher=launcher)
    assert done.code != 0
    assert done.only_message.startswith("hvdtrain: rank 0 (host "), done.output
    assert "all ranks must make the same number of steps. Received: rank" in done.only_message
    assert f"rank {ranks - 1} (host " in done.only_message
    assert "ended after step 12, and this rank waited for it." in done.only_message
    assert "Traceback" not in done.output


@pytest.mark.parametrize("launcher", ["mpirun", LONG("horovodrun --gloo")])
def test_an_error_is_shown_with_its_rank_and_step_and_without_those_it_causes(launcher):
    done = end_of("raises", "tape", launcher=launcher)
    assert done.code != 0
    assert done.only_message.startswith("hvdtrain: rank 1 (host "), done.output
    assert "failed after step 12: ValueError: no such sample" in done.only_message
    assert done.output.count("Traceback") == 1


@pytest.mark.parametrize(("how", "reduced_by"), [("sleeps", "optimizer"), LONG("reads", "tape")])
def test_a_rank_that_the_others_wait_for_is_named_and_the_job_goes_on(how, reduced_by):
    done = end_of(how, reduced_by, launcher="horovodrun --gloo")
    assert done.code == 0, done.output
    first = next(line for line in done.output.splitlines() if "hvdtrain: no rank has made a step for" in line)
    assert "the others wait for rank 1 (host " in first
    assert "rank 1 (host " in done.output
    assert f", in {how}" in done.output


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_rank_is_suspended_for_longer_than_gloo_would_wait(launcher):
    done = end_of("stops", "optimizer", launcher=launcher)
    assert done.code == 0, done.output
    assert re.search(r"no rank has made a step for \d+ s; rank 1 \(host \w+\) does not answer", done.output), (
        done.output
    )


FORGOTTEN_GUARD = """
import multiprocessing, sys
import hvdtrain
hvdtrain.init()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    sys.exit(child.exitcode != 1)
"""


def test_a_child_that_imports_the_program_of_a_rank_is_refused(tmp_path):
    (tmp_path / "program.py").write_text(FORGOTTEN_GUARD)
    done = run_job([sys.executable, str(tmp_path / "program.py")], ranks=2, timeout_s=60)
    assert done.code == 0, done.output
    assert done.output.count("each rank must be one process. Received: hvdtrain.init() in a process that a rank") == 2
