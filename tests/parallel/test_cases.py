"""Starts the files of cases on real ranks. Few jobs, many assertions in each: TensorFlow starts slowly."""

import pytest
from launcher import run_cases

MINIMUM = {"optimizer": 40, "training": 33, "options": 21, "faults": 15, "callbacks": 50, "resume": 11, "averaging": 36}
# A training after the other: on 4 ranks and 2 cores several minutes of them, run by hand.
BY_HAND = [(name, 4) for name in ("callbacks", "resume", "averaging", "options", "training")]
RANKS = [(name, ranks) for name in MINIMUM for ranks in (2, 4) if (name, ranks) not in BY_HAND]


@pytest.mark.parametrize(("name", "ranks"), [("options", 1), *RANKS])
def test_cases(name, ranks, tmp_path):
    run_cases(name, ranks=ranks, minimum=MINIMUM[name], folder=tmp_path, timeout_s=500)
