"""Programs of docs/migrating.md and those of other libraries that they replace, if these are installed."""

import subprocess
import sys

import pytest
from doc_blocks import ROOT, blocks
from launcher import run_job

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "migrating.md"


def program(title, folder):
    (block,) = [each for each in blocks() if each.page == PAGE and each.title == title]
    path = folder / title
    path.write_text(block.text)
    return path


def weights_in(output: str) -> list[float]:
    (line,) = [each for each in output.splitlines() if each.startswith("weights ")]
    return [float(each) for each in line.split()[1:]]


def test_a_custom_loop_of_tf_distribute(tmp_path):
    command = [sys.executable, str(program("mirrored.py", tmp_path))]
    theirs = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert theirs.returncode == 0, theirs.stderr
    ours = run_job([sys.executable, str(program("summed.py", tmp_path))], ranks=2, timeout_s=120)
    assert ours.code == 0, ours.output
    expected = weights_in(theirs.stdout)
    assert len(expected) == 10
    assert weights_in(ours.output) == pytest.approx(expected, rel=1e-6)
