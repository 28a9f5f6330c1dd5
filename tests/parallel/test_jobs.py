"""Whole jobs, launched as a user launches them."""

import hashlib
import json
import sys
import time
from pathlib import Path

import pytest
from launcher import LONG, Job, run_job

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "hvdtrain"]
SUMMARY_KEYS = {
    *("task", "mode", "ranks", "hosts", "steps", "epochs", "samples", "loss", "metrics", "eval", "wall_seconds"),
    *("examples_per_second", "step_ms", "communication_fraction", "bytes_reduced", "averaging_rounds"),
    *("resumed_from", "weights_sha256"),
}


def weights_sha256(checkpoint: Path) -> str:
    """The digest of the model's variables in a checkpoint."""
    import tensorflow as tf

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    names = [name for name, *_ in manifest["variables"] if name.startswith("model/")]
    reader = tf.train.load_checkpoint(str(checkpoint / "state"))
    return hashlib.sha256(b"".join(reader.get_tensor(name).tobytes() for name in names)).hexdigest()


@pytest.mark.parametrize(
    ("launcher", "ranks"), [LONG("horovodrun", 2), LONG("horovodrun --gloo", 2), LONG("mpirun", 2), ("horovodrun", 4)]
)
def test_digits_from_the_command_line(launcher, ranks, tmp_path):
    run_dir = tmp_path / "run with a space"
    job = run_job([*TRAIN, "--run-dir", str(run_dir)], ranks=ranks, launcher=launcher, timeout_s=180)
    assert job.code == 0, job.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["ranks"] == ranks
    assert summary["eval"]["accuracy"] >= 0.97
    assert "weights: equal on all ranks" in job.output
    assert summary["samples"] == 1437 * summary["epochs"]
    assert summary["bytes_reduced"] == summary["steps"] * 38_866 * 4
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    assert json.loads((run_dir / "config.json").read_text())["batch_size"] == 32
    assert (run_dir / "model.keras").is_file()
    assert 0.005 < summary["communication_fraction"] < 1  # reading the clock twice takes less
    assert summary["skew"]["slowest_rank"] in range(ranks)
    assert "share of step    input" in job.output
    *_, checkpoint = sorted((run_dir / "checkpoints").iterdir())
    assert checkpoint.name == f"step-{summary['steps']:08d}"
    assert weights_sha256(checkpoint) == summary["weights_sha256"]
    # Only rank 0 logs: each line once.
    assert job.output.count(f"step {summary['steps']}  evaluation:") == 1


def test_many_options_in_one_job(tmp_path):
    """TensorBoard's own reader finds every scalar, histogram and graph that was requested."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, timeline = tmp_path / "run", tmp_path / "timeline.json"
    options = {
        **{"steps": 40, "steps-per-execution": 10, "log-every": 5, "eval-every": 20, "histograms-every": 15},
        **{"optimizer": "momentum", "learning-rate": 0.02, "lr-scaling": "sqrt", "warmup-steps": 7, "ema": 0.9},
        **{"lr-decay": "cosine", "clip-norm": 1.0, "weight-decay": 1e-4, "compression": "fp16", "groups": 2},
        **{"gradient-accumulation-steps": 2},
        **{"batch-size": 16, "mixed-precision": "bfloat16", "on-nan": "skip", "profile-steps": "21:23"},
        **{"timeline": timeline, "run-dir": run_dir},
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    job = run_job([*TRAIN, *flags, "--sync-batchnorm"], ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 40
    assert 0 < summary["compression_error"] < 0.01
    assert summary["bytes_reduced"] == 40 * 38_866 * 2
    assert "global batch: 64 samples" in job.output
    assert "learning rate: 0.0282843 (momentum, decay cosine, warm-up 7 steps)" in job.output
    events = {}
    for name in ("train", "eval"):
        events[name] = EventAccumulator(str(run_dir / "tensorboard" / name), size_guidance={"scalars": 0})
        events[name].Reload()
    assert {"loss", "accuracy", "learning_rate", "gradient_norm", "examples_per_second"} <= set(
        events["train"].Tags()["tensors"]
    ) | set(events["train"].Tags()["scalars"])
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in logged if each["event"] == "train"] == list(range(5, 41, 5))
    assert [each["step"] for each in logged if each["event"] == "eval"] == [20, 40]
    tags = events["train"].Tags()
    assert tags["graph"]
    histograms = {
        each for each in [*tags["histograms"], *tags["tensors"]] if each.startswith(("weights/", "gradients/"))
    }
    assert len(histograms) == 2 * 8, histograms
    assert json.loads(
        timeline.read_text().rstrip().rstrip(",") + ("" if timeline.read_text().rstrip().endswith("]") else "]")
    )
    assert list((run_dir / "tensorboard").rglob("*.xplane.pb"))


def test_eval_watch(tmp_path):
    """A separate job evaluates checkpoints while the run continues, and ends with the run's last one."""
    run_dir = tmp_path / "run"
    train = Job([*TRAIN, "--run-dir", str(run_dir), "--steps", "120", "--checkpoint-every", "40"], ranks=2)
    while not (run_dir / "config.json").exists():
        time.sleep(0.1)
    job = run_job([*TRAIN, "eval", "--run-dir", str(run_dir), "--watch"], ranks=1, timeout_s=120)
    assert job.code == 0, job.output
    assert train.end(60).code == 0
    steps = [json.loads(line)["step"] for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert steps[-1] == 120
    assert steps == sorted(set(steps))


def test_doctor_under_a_launcher():
    job = run_job([*TRAIN, "doctor"], ranks=2, timeout_s=60)
    assert job.code == 0, job.output
    assert job.output.count("A job can run here.") == 1
    assert "1 MiB on 2 rank(s): correct" in job.output


@pytest.mark.long
def test_autotune_does_not_change_the_run(tmp_path, monkeypatch):
    """The run equals one with the chosen settings, and resumes with them, without trying them again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {name: tmp_path / name for name in ("tuned", "uninterrupted")}
    autotune = ("--autotune", "--autotune-limit", "10000")
    lines = []
    for name, *more in (
        ("tuned", "--steps", "20", *autotune),
        ("tuned", "--steps", "30", *autotune),
        ("uninterrupted", "--steps", "30"),
    ):
        job = run_job([*TRAIN, *more, "--run-dir", str(folders[name])], ranks=2, timeout_s=180)
        assert job.code == 0, job.output
        lines += [line for line in job.output.splitlines() if "autotune: " in line]
    config = json.loads((folders["tuned"] / "config.json").read_text())
    measured, remembered = lines
    assert f"autotune: --steps-per-execution {config['steps_per_execution']}, --groups" in measured
    assert measured.count(" ms") == 7
    assert "; --jit-compile" in measured
    assert remembered.startswith(measured)
    assert "(as measured in an earlier run" in remembered
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders.values()]
    assert found[0]["resumed_from"] == 20
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_bench(tmp_path):
    """Measures all ranks and one rank alone; marks what was not measured steadily."""
    line = [*TRAIN, "bench", "--output", str(tmp_path), "--blocks", "4", "--block-seconds", "0.2"]
    unsteady = run_job([*line, "--max-spread", "1e-9"], ranks=2, timeout_s=120)
    assert unsteady.code == 0, unsteady.output
    assert "* unsteady: two measurements of 'sync' must differ by at most" in unsteady.output
    assert all(case["unsteady"] for case in json.loads((tmp_path / "bench.json").read_text())["cases"].values())
    line += ["--max-spread", "100", "--sync-every", "5", "--predict", "2", "--compressions", "fp16"]
    job = run_job(line, ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    found = json.loads((tmp_path / "bench.json").read_text())
    assert not any(case["unsteady"] for case in found["cases"].values())
    ranks = {name: case["ranks"] for name, case in found["cases"].items()}
    assert ranks == {"one rank alone": 1, "no communication": 2, "sync": 2, "local": 2, "sync, fp16": 2}
    assert found["ratios"].keys() == {
        "no communication over one rank alone",
        "sync over no communication",
        "local over no communication",
        "sync, fp16 over sync",
    }
    assert found["bytes_per_step"]["sync"] == 2 * found["bytes_per_step"]["sync, fp16"] > 0
    assert found["recommended_compression"] in ("none", "fp16")
    assert found["steps_of_a_measurement"] % 5 == 0
    assert sum(found["shares"][f"{name}_fraction"] for name in ("input", "compute", "communication")) >= 0.99
    assert found["shares"]["communication_fraction"] > 0
    assert all(row["over_mpi"] > 0 for row in found["network"]["allreduce"])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert job.output.count("one rank alone") == 2
    assert "predicted, not measured:" in job.output
    predicted = found["prediction"]
    assert [(row["ranks"], row["mode"]) for row in predicted["rows"]] == [(2, "sync"), (2, "local")]
    assert sum(size for size, _ in predicted["messages"]) == 4 * found["parameters"]
    assert all(0 < share <= 1 for _, share in predicted["messages"])
