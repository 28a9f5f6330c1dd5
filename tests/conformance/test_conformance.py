"""Runs the programs on real ranks: a training in one process, then ``model.fit`` and ``Trainer`` on all ranks."""

import pytest
from launcher import run_cases

pytestmark = pytest.mark.slow

NUM_CASES, NUM_QUICK_CASES = 1015, 22


def test_programs_on_two_ranks(tmp_path):
    run_cases("programs", ranks=2, minimum=NUM_QUICK_CASES, folder=tmp_path, timeout_s=600)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_in_all_ways(ranks, tmp_path):
    more = ["-m", "long or not long"]
    run_cases("programs", *more, ranks=ranks, minimum=NUM_CASES, folder=tmp_path, timeout_s=7200)


@pytest.mark.long
def test_mutations_on_two_ranks(tmp_path):
    run_cases("mutations", ranks=2, minimum=2, folder=tmp_path, timeout_s=900)
