"""Runs the programs on real ranks, as they are and broken, and compares them with a training in one process."""

import pytest
from launcher import run_cases

pytestmark = pytest.mark.slow

NUM_CASES, NUM_QUICK_CASES = 1015, 22
NUM_BROKEN, NUM_QUICK_BROKEN = 76, 12
NUM_CHECKED, NUM_QUICK_CHECKED = 546, 7


def test_programs_on_two_ranks(tmp_path):
    run_cases("programs", ranks=2, minimum=NUM_QUICK_CASES, folder=tmp_path, timeout_s=600)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_in_all_ways(ranks, tmp_path):
    more = ["-m", "long or not long"]
    run_cases("programs", *more, ranks=ranks, minimum=NUM_CASES, folder=tmp_path, timeout_s=7200)


def test_broken_programs_on_two_ranks(tmp_path):
    run_cases("broken_programs", ranks=2, minimum=NUM_QUICK_BROKEN, folder=tmp_path, timeout_s=600)


@pytest.mark.long
def test_all_broken_programs(tmp_path):
    more = ["-m", "long or not long"]
    run_cases("broken_programs", *more, ranks=2, minimum=NUM_BROKEN, folder=tmp_path, timeout_s=3600)


def test_the_check_of_programs_on_two_ranks(tmp_path):
    run_cases("checked_programs", ranks=2, minimum=NUM_QUICK_CHECKED, folder=tmp_path, timeout_s=300)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_check_of_all_programs(ranks, tmp_path):
    more = ["-m", "long or not long"]
    run_cases("checked_programs", *more, ranks=ranks, minimum=NUM_CHECKED, folder=tmp_path, timeout_s=7200)


@pytest.mark.long
def test_mutations_on_two_ranks(tmp_path):
    run_cases("mutations", ranks=2, minimum=2, folder=tmp_path, timeout_s=900)
