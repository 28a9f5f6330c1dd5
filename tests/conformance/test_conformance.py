"""Runs the programs on real ranks: a training in one process, then ``model.fit`` and ``Trainer`` on all ranks."""

import pytest
from launcher import run_cases

pytestmark = pytest.mark.slow

NUM_CASES = 66


def test_programs_on_two_ranks(tmp_path):
    run_cases("programs", ranks=2, minimum=NUM_CASES, folder=tmp_path, timeout_s=600)


@pytest.mark.long
def test_programs_on_four_ranks(tmp_path):
    run_cases("programs", ranks=4, minimum=NUM_CASES, folder=tmp_path, timeout_s=1800)
