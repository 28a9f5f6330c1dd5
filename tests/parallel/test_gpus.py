"""Ranks on GPUs, which these tests show to the jobs they start; without a GPU, on a device that stands for one."""

import json
import os
import sys
from pathlib import Path

import pytest
from launcher import LONG, TESTS, run_cases, run_job

from hvdtrain.system import nvidia
from hvdtrain.system.json_files import read_lines
from hvdtrain.tasks import sample_data

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "hvdtrain"]
needs_gpu = pytest.mark.skipif(not nvidia.hardware().has_driver, reason="needs an NVIDIA GPU")


@pytest.fixture
def one_gpu(monkeypatch):
    """Shows jobs the first GPU of those that CUDA_VISIBLE_DEVICES names; it hides them from all other tests."""
    named = os.environ["CUDA_VISIBLE_DEVICES"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if named == "-1" else named.partition(",")[0])
    # With TF32, the default, products of float32 have an error of 3e-4.
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")


@pytest.mark.parametrize(
    ("names", "minimum"),
    [
        ("metrics", 44),
        LONG("training", 41),
        LONG("fit+differing_ranks", 33),
        LONG("guards", 41),
        LONG("optimizer", 48),
        LONG("local_sgd+local_members", 27),
        LONG("programs", 70),
    ],
)
def test_cases_on_a_device_that_stands_for_a_gpu(names, minimum, tmp_path):
    run_cases(names, "-p", "stand_in_gpu", ranks=2, minimum=minimum, folder=tmp_path, timeout_s=900)


def test_ranks_that_share_a_device_are_refused_in_one_line(tmp_path):
    program = (
        "import os, sys, stand_in_gpu; os.environ['CUDA_VISIBLE_DEVICES'] = '0'; from hvdtrain.__main__ import main; "
        f"sys.argv[1:] = ['--run-dir', {str(tmp_path / 'run')!r}]; sys.exit(main())"
    )
    refused = run_job([sys.executable, "-c", program], ranks=2, timeout_s=120, cwd=TESTS)
    assert refused.code == 64
    assert "each rank must have its own GPU. Received: 2 ranks share 1 GPU(s)" in refused.only_message


@needs_gpu
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
@pytest.mark.parametrize(
    ("names", "minimum"), [("training", 41), ("fit+averager+guards", 86), ("local_sgd+local_members+resume", 41)]
)
def test_cases_on_a_shared_gpu(names, minimum, launcher, one_gpu, tmp_path):
    run_cases(names, ranks=2, launcher=launcher, minimum=minimum, folder=tmp_path, timeout_s=900)


@needs_gpu
@pytest.mark.parametrize("task", ["digits", "cifar10"])
def test_a_run_ends_with_the_loss_of_one_on_the_cpu(task, one_gpu, tmp_path, monkeypatch):
    line = [*TRAIN, "--task", task, "--steps", "50"]
    if task != "digits":
        sample_data.write(task, tmp_path / "data")
        line += ["--data-dir", str(tmp_path / "data")]
    on_gpu = summary(line, tmp_path / "gpu")
    logged = [each for each in read_lines(tmp_path / "gpu" / "metrics.jsonl") if "gpu_memory_mib" in each]
    assert 0 < logged[-1]["gpu_memory_mib"] < 4096  # as much as is needed, not all that there is
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert on_gpu["loss"] == pytest.approx(summary(line, tmp_path / "cpu")["loss"], abs=1e-3)
    assert not any("gpu_memory_mib" in each for each in read_lines(tmp_path / "cpu" / "metrics.jsonl"))


def summary(line: list[str], run_dir: Path) -> dict:
    job = run_job([*line, "--run-dir", str(run_dir)], ranks=1, timeout_s=300)
    assert job.code == 0, job.output
    return json.loads((run_dir / "summary.json").read_text())


@needs_gpu
def test_a_gpu_is_shared_on_request_only(one_gpu, tmp_path):
    line = [*TRAIN, "--steps", "20", "--run-dir"]
    refused = run_job([*line, str(tmp_path / "refused")], ranks=2, timeout_s=120)
    assert refused.code != 0
    assert "each rank must have its own GPU. Received: 2 ranks share 1 GPU(s)" in refused.only_message
    shared = run_job([*line, str(tmp_path / "shared"), "--share-gpus"], ranks=2, timeout_s=300)
    assert shared.code == 0, shared.output
