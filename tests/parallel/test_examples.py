"""The programs in examples/."""

import json
import re
import sys

import pytest
from launcher import ROOT, run_job

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "hvdtrain"]


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.stem not in ("own_task", "resume_after_kill")],
    ids=lambda path: path.stem,
)
def test_example(path):
    job = run_job([sys.executable, str(path)], ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    accuracies = re.findall(r"test accuracy ([\d.]+) after training on 2 rank", job.output)
    assert len(accuracies) == 1
    assert float(accuracies[0]) > 0.95


def test_own_task(tmp_path):
    path = ROOT / "examples" / "own_task.py"
    assert len(path.read_text().splitlines()) < 40
    job = run_job([*TRAIN, "--task", str(path)], ranks=2, timeout_s=120, cwd=tmp_path)
    assert job.code == 0, job.output
    assert json.loads((tmp_path / "runs" / "own_task" / "summary.json").read_text())["eval"]["accuracy"] > 0.93


def test_resume_after_kill():
    job = run_job(
        [sys.executable, str(ROOT / "examples" / "resume_after_kill.py")], ranks=1, launcher="", timeout_s=180
    )
    assert job.code == 0, job.output
    digests = re.findall(r"(?:uninterrupted|killed and resumed): (\w{64})", job.output)
    assert len(digests) == 2
    assert digests[0] == digests[1]
