"""Whole jobs, started as a user starts them."""

import json
import re
import sys
from pathlib import Path

import pytest
from launcher import ROOT, Finished, run_job

TRAIN = [sys.executable, "-m", "hvdtrain"]
SUMMARY_KEYS = {
    *("task", "mode", "ranks", "hosts", "steps", "epochs", "samples", "loss", "metrics", "eval", "wall_seconds"),
    *("examples_per_second", "step_ms", "communication_fraction", "bytes_reduced", "averaging_rounds"),
    *("resumed_from", "weights_sha256"),
}


def told(job: Finished) -> list[str]:
    """The lines in which a rank tells why the job ended; launchers put a tag before them."""
    return [line for line in job.output.splitlines() if re.search(r"(^|>:)hvdtrain: ", line)]


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("horovodrun", 2), ("horovodrun --gloo", 2), ("mpirun", 2), ("horovodrun", 4)]
)
def test_digits_from_the_command_line(launcher, ranks, tmp_path):
    run_dir = tmp_path / "run with a space"
    job = run_job([*TRAIN, "--run-dir", str(run_dir)], ranks=ranks, launcher=launcher, timeout_s=180)
    assert job.code == 0, job.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["ranks"] == ranks
    assert summary["eval"]["accuracy"] >= 0.97
    assert f"weights_sha256: {summary['weights_sha256']} (equal on all ranks)" in job.output
    assert summary["samples"] == 1437 * summary["epochs"]
    assert summary["bytes_reduced"] == summary["steps"] * 38_866 * 4
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    assert json.loads((run_dir / "config.json").read_text())["batch_size"] == 32
    assert (run_dir / "model.keras").is_file()
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    assert json.loads((checkpoint / "manifest.json").read_text())["weights_sha256"] == summary["weights_sha256"]
    # One rank tells: each line once.
    assert job.output.count(f"step {summary['steps']}  evaluation:") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--task", "nothing"], 64, "--task must name a task: digits. Received: 'nothing'"),
        (["--batch-size", "0"], 64, "--batch-size must be at least 1. Received: 0"),
        (["--learning-rate", "fast"], 64, "--learning-rate must be a number. Received: 'fast'"),
        (["--optimizer", "nothing"], 64, "--optimizer must be"),
        (["--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder. Received: '/nowhere'"),
        (["--run-dir", "{occupied}"], 65, "which holds something else"),
        # Ranks that were started in different ways; mpirun takes a command for each after a colon.
        (
            ["--seed", "1", ":", "-np", "1", *TRAIN, "--seed", "2", "--run-dir", "{run}"],
            78,
            "--seed: 1 on rank 0, 2 on",
        ),
        ([":", "-np", "1", *TRAIN, "--steps", "x", "--run-dir", "{run}"], 64, "--steps must be a whole number"),
    ],
)
def test_bad_input_is_told_once_and_leaves_nothing(arguments, code, message, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("mine")
    run_dir = tmp_path / "run"
    filled = [argument.format(occupied=occupied, run=run_dir) for argument in arguments]
    ranks = 1 if ":" in arguments else 2
    where = [] if "--run-dir" in arguments and ":" not in arguments else ["--run-dir", str(run_dir)]
    job = run_job([*TRAIN, *where, *filled], ranks=ranks, timeout_s=60)
    assert job.code == code, job.output
    assert len(told(job)) == 1, job.output
    assert message in told(job)[0]
    assert "Traceback" not in job.output
    assert not run_dir.exists()
    assert [path.name for path in occupied.iterdir()] == ["thesis.txt"]


def test_an_exception_of_one_rank_ends_the_job_with_its_cause(tmp_path):
    """Rank 1 fails in the third step; rank 0 waits in the reduction and has to be ended."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import hvdtrain, sys\n"
        "topology = hvdtrain.init()\n"
        "from hvdtrain import job, steps\n"
        "train = steps.CompiledSteps.train\n"
        "def failing(self, *arguments):\n"
        "    failing.calls += 1\n"
        "    if topology.rank == 1 and failing.calls == 3:\n"
        "        raise ValueError('the third step is cursed')\n"
        "    return train(self, *arguments)\n"
        "failing.calls = 0\n"
        "steps.CompiledSteps.train = failing\n"
        "from hvdtrain.cli import main\n"
        f"sys.exit(main(['--steps', '50', '--run-dir', {str(tmp_path / 'run')!r}]))\n"
    )
    job = run_job([sys.executable, str(script)], ranks=2, timeout_s=60)
    assert job.code == 1, job.output
    assert len(told(job)) == 1, job.output
    assert re.search(r"rank 1 \(host .*\) failed at step 2: ValueError: the third step is cursed", told(job)[0])
    assert job.output.count("Traceback") == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
def test_example(name):
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 80
    job = run_job([sys.executable, str(path)], ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    told_accuracy = re.findall(r"test accuracy ([\d.]+) after training on 2 rank", job.output)
    assert len(told_accuracy) == 1
    assert float(told_accuracy[0]) > 0.95


def test_doctor_under_a_launcher():
    job = run_job([*TRAIN, "doctor"], ranks=2, timeout_s=60)
    assert job.code == 0, job.output
    assert job.output.count("A job can run here.") == 1
    assert "1 MiB on 2 rank(s): right" in job.output


def test_the_fixture_fails_on_a_hang_an_error_and_an_empty_run(tmp_path):
    """The tests of this folder rest on it: it must not be green for a job that did nothing."""
    from launcher import executed_tests, run_cases

    with pytest.raises(AssertionError, match="did not end within"):
        run_job([sys.executable, "-c", "import time; time.sleep(60)"], ranks=2, timeout_s=3)
    with pytest.raises(AssertionError, match="exit code"):
        run_cases("that_do_not_exist", ranks=1, minimum=0, folder=tmp_path, timeout_s=60)
    assert executed_tests(tmp_path / "none.xml") == 0
    skipped = Path(tmp_path / "skipped.xml")
    skipped.write_text('<testsuites><testsuite tests="5" failures="1" errors="0" skipped="3"/></testsuites>')
    assert executed_tests(skipped) == 1
