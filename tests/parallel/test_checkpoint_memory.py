"""The memory that a checkpoint needs in local mode, where each rank has a model and an optimizer of its own."""

import re
import subprocess
import sys

import pytest
from launcher import ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_the_state_of_others(ranks):
    script = ROOT / "benchmarks" / "checkpoint_memory.py"
    command = [sys.executable, str(script), "--megabytes", "400", "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(save|restore), .* rank 0 ([\d.]+)x, others ([\d.]+)x", done.stdout, re.MULTILINE)
    assert [action for action, *_ in found] == ["save", "restore"], done.stdout
    for action, first, others in found:
        assert float(first) <= 2.2, (action, done.stdout)
        assert float(others) <= 1.2, (action, done.stdout)
