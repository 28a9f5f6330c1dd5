"""Whole jobs with compressed gradients, and what they keep when the number of ranks changes."""

import json
from pathlib import Path

import numpy as np
import pytest
from elastic_runs import GLOBAL_BATCH, TRAIN, summary, weights
from launcher import run_commands

from hvdtrain.checkpoint.rank_file import RankFileReader

pytestmark = pytest.mark.slow

SAVED, STEPS = 40, 120
RATE = 0.1
SGD = ["--optimizer", "sgd", "--learning-rate", RATE, "--global-batch-size", GLOBAL_BATCH, "--check-every", 10]
COMPRESSIONS = ("powersgd:2", "fp16")


def train(compression: str, run_dir: Path, steps: int, *more: object) -> list[object]:
    """The options of a run."""
    return [*TRAIN[3:], *SGD, "--compression", compression, "--run-dir", run_dir, "--steps", steps, *more]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def mean_errors(run_dir: Path, step: int) -> list[np.ndarray]:
    """What compression had left out by a step, the mean over ranks."""
    checkpoint = checkpoint_of(run_dir, step)
    ranks = json.loads((checkpoint / "manifest.json").read_text())["ranks"]
    file = RankFileReader(checkpoint / "ranks.safetensors", ranks)
    names = [name for name, *_ in file.specs[0] if "/error_" in name]
    return [np.mean([file.array(rank, name) for rank in range(ranks)], axis=0) for name in names]


def with_errors_sent(run_dir: Path, step: int) -> list[np.ndarray]:
    """The kernels at the end, after a step, if nothing had been left out: equal on any number of ranks."""
    errors = {each.shape: each for each in mean_errors(run_dir, step)}
    kernels = [value for _, value in sorted(weights(run_dir).items()) if value.ndim == 2]
    return [kernel - RATE * errors.get(kernel.shape, 0) for kernel in kernels]


@pytest.mark.long
def test_what_was_not_sent_is_kept_on_other_numbers_of_ranks(tmp_path):
    """Runs of 2 ranks continue on 2, on 4 and on one rank; in the next step, the gradient is the same on all."""
    saved = {name: tmp_path / f"saved {name}" for name in COMPRESSIONS}
    next_step = {ranks: tmp_path / f"next step on {ranks}" for ranks in (2, 4, 1)}
    runs = {ranks: {name: tmp_path / f"{name} on {ranks}" for name in COMPRESSIONS} for ranks in next_step}
    for ranks, folders in runs.items():
        lines = [train(name, saved[name], SAVED) for name in COMPRESSIONS] if ranks == 2 else []
        resume = {name: ["--resume", checkpoint_of(saved[name], SAVED)] for name in COMPRESSIONS}
        lines += [train("powersgd:2", next_step[ranks], SAVED + 1, *resume["powersgd:2"])]
        lines += [train(name, run_dir, STEPS, *resume[name]) for name, run_dir in folders.items()]
        for done in run_commands(lines, ranks=ranks, folder=tmp_path / f"job {ranks}", timeout_s=240):
            assert done.code == 0, done.output
            assert "weights: equal on all ranks" in done.output
    # Far more than the tolerance below.
    assert all(np.abs(RATE * each).max() > 1e-3 for each in mean_errors(saved["powersgd:2"], SAVED))
    for ranks in (4, 1):
        after_it = (with_errors_sent(next_step[each], SAVED + 1) for each in (ranks, 2))
        for ours, theirs in zip(*after_it, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-9)
        for name, tolerance in (("powersgd:2", 0.03), ("fp16", 1e-4)):
            found = summary(runs[ranks][name])
            assert (found["ranks"], found["steps"], found["resumed_from"]) == (ranks, STEPS, SAVED)
            assert found["loss"] == pytest.approx(summary(runs[2][name])["loss"], rel=tolerance)
    # A single rank compresses nothing: it has sent all of it in its first step.
    assert not any(each.any() for each in mean_errors(next_step[1], SAVED + 1))
