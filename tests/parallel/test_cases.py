"""Starts the files of cases on real ranks. Few jobs, many assertions in each: TensorFlow starts slowly."""

import pytest
from launcher import run_cases

# A file of cases and the number of ranks, to how many cases have to pass.
JOBS = {
    ("options", 1): 21,
    ("options", 2): 21,
    ("optimizer", 2): 40,
    ("optimizer", 4): 28,
    ("training", 2): 33,
    ("faults", 2): 15,
    ("callbacks", 2): 50,
    ("resume", 2): 11,
    ("averaging", 2): 36,
}
# A training after the other: on 4 ranks and 2 cores several minutes of them.
LONG_JOBS = {(name, 4): minimum for (name, ranks), minimum in JOBS.items() if ranks == 2 and name != "optimizer"}


@pytest.mark.parametrize(("name", "ranks"), JOBS)
def test_cases(name, ranks, tmp_path):
    run_cases(name, ranks=ranks, minimum=JOBS[name, ranks], folder=tmp_path, timeout_s=500)


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), LONG_JOBS)
def test_cases_on_more_ranks(name, ranks, tmp_path):
    run_cases(name, ranks=ranks, minimum=LONG_JOBS[name, ranks], folder=tmp_path, timeout_s=900)
