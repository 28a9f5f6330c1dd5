"""Whole jobs, started as a user starts them."""

import hashlib
import json
import re
import sys
import time
from pathlib import Path

import pytest
from launcher import LONG, ROOT, Finished, Job, run_commands, run_job

TRAIN = [sys.executable, "-m", "hvdtrain"]
SUMMARY_KEYS = {
    *("task", "mode", "ranks", "hosts", "steps", "epochs", "samples", "loss", "metrics", "eval", "wall_seconds"),
    *("examples_per_second", "step_ms", "communication_fraction", "bytes_reduced", "averaging_rounds"),
    *("resumed_from", "weights_sha256"),
}


def weights_sha256(checkpoint: Path) -> str:
    """The digest of the model's variables as the checkpoint holds them."""
    import tensorflow as tf

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    names = [name for name, *_ in manifest["variables"] if name.startswith("model/")]
    reader = tf.train.load_checkpoint(str(checkpoint / "state"))
    return hashlib.sha256(b"".join(reader.get_tensor(name).tobytes() for name in names)).hexdigest()


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("horovodrun", 2), LONG("horovodrun --gloo", 2), LONG("mpirun", 2), ("horovodrun", 4)]
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
    assert 0.005 < summary["communication_fraction"] < 1  # two readings of a clock alone are less
    assert summary["skew"]["slowest_rank"] in range(ranks)
    assert "share of step    input" in job.output
    *_, checkpoint = sorted((run_dir / "checkpoints").iterdir())
    assert checkpoint.name == f"step-{summary['steps']:08d}"
    assert weights_sha256(checkpoint) == summary["weights_sha256"]
    # One rank tells: each line once.
    assert job.output.count(f"step {summary['steps']}  evaluation:") == 1


@pytest.fixture
def occupied(tmp_path) -> Path:
    folder = tmp_path / "occupied"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return folder


def test_bad_input_is_told_once_and_leaves_nothing(occupied, tmp_path):
    run_dir, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    own_task = tmp_path / "broken.py"
    own_task.write_text((ROOT / "examples" / "own_task.py").read_text().replace("table.target[training]", "1 / 0"))
    no_run = f"--run-dir must be the folder of a run, with its config.json. Received: {empty}"
    expected = [
        (["--run-dir", run_dir, "--task", "nothing"], 64, "--task must name a task (digits, "),
        (["--run-dir", run_dir, "--batch-size", "0"], 64, "--batch-size must be at least 1. Received: 0"),
        (["--run-dir", run_dir, "--learning-rate", "fast"], 64, "--learning-rate must be a number. Received: 'fast'"),
        (["--run-dir", run_dir, "--optimizer", "nothing"], 64, "--optimizer must be"),
        (["--run-dir", run_dir, "--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder. Received: '/no"),
        (["--run-dir", run_dir, "--task", "cifar10", "--data-dir", empty], 65, "cs.toronto.edu"),
        (["--run-dir", run_dir, "--task", "cifar10", "--data-dir", empty], 65, "--make-sample-data"),
        (["--run-dir", run_dir, "--task", own_task], 1, "ZeroDivisionError: division by zero"),
        (["--run-dir", occupied], 65, "which holds something else"),
        (["eval", "--run-dir", empty], 65, no_run),
        (["export", "--run-dir", empty], 65, no_run),
        (["fly"], 64, "the command must be one of train, eval"),
    ]
    found = run_commands([line for line, *_ in expected], ranks=2, folder=tmp_path / "said", timeout_s=120)
    for done, (line, code, message) in zip(found, expected, strict=True):
        assert done.code == code, (line, done.output)
        assert message in done.only_line_told, line
        traceback = f'File "{own_task}"' if own_task in line else None
        assert done.output.count("Traceback") == (traceback is not None), (line, done.output)
        assert traceback is None or traceback in done.output
    assert not run_dir.exists()
    assert not list(empty.iterdir())
    assert [path.name for path in occupied.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--task", "nothing"], 64, "--task must name a task (digits, "),
        LONG(["--run-dir", "{occupied}"], 65, "which holds something else"),
        # Ranks that were started in different ways; mpirun takes a command for each after a colon.
        (
            ["--seed", "1", ":", "-np", "1", *TRAIN, "--seed", "2", "--run-dir", "{run}"],
            78,
            "--seed: 1 on rank 0, 2 on",
        ),
        ([":", "-np", "1", *TRAIN, "--steps", "x", "--run-dir", "{run}"], 64, "--steps must be a whole number"),
    ],
)
def test_a_job_of_bad_input_ends_with_its_code(arguments, code, message, occupied, tmp_path):
    run_dir = tmp_path / "run"
    filled = [argument.format(occupied=occupied, run=run_dir) for argument in arguments]
    ranks = 1 if ":" in arguments else 2
    where = [] if "--run-dir" in arguments and ":" not in arguments else ["--run-dir", str(run_dir)]
    job = run_job([*TRAIN, *where, *filled], ranks=ranks, timeout_s=60)
    assert job.code == code, job.output
    assert message in job.only_line_told
    assert "Traceback" not in job.output
    assert not run_dir.exists()
    assert [path.name for path in occupied.iterdir()] == ["thesis.txt"]


def test_every_option_in_one_job_shows_in_tensorboard(tmp_path):
    """Read back with TensorBoard's own reader: every scalar, histogram and graph that was asked for."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, timeline = tmp_path / "run", tmp_path / "timeline.json"
    options = {
        **{"steps": 40, "steps-per-call": 10, "log-every": 5, "eval-every": 20, "histograms-every": 15, "groups": 2},
        **{"optimizer": "momentum", "learning-rate": 0.02, "lr-scaling": "sqrt", "warmup-steps": 7, "ema": 0.9},
        **{"lr-decay": "cosine", "clip-norm": 1.0, "weight-decay": 1e-4, "compression": "fp16", "accumulate": 2},
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


@pytest.mark.parametrize(("launcher", "code"), [("mpirun", 1), LONG("horovodrun --gloo", 1)])
def test_diverging_training_is_ended_by_every_rank_and_told_once(launcher, code, tmp_path):
    job = run_job(
        [*TRAIN, "--optimizer", "sgd", "--learning-rate", "1e30", "--run-dir", str(tmp_path / "run")],
        ranks=2,
        launcher=launcher,
        timeout_s=90,
    )
    assert job.code == code, job.output
    assert re.search(r"At step \d+: (the loss|the gradient of .*) on rank \d", job.only_line_told)
    assert not (tmp_path / "run" / "model.keras").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


RECORDS = """
import sys
import hvdtrain
topology = hvdtrain.init(seed=0)
import keras, tensorflow as tf
from pathlib import Path
from hvdtrain import runtime
from hvdtrain.failure import end_job
folder, allowed, grows = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "grows"
collectives = runtime.current().collectives

def parse(serialized):
    features = {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_single_example(serialized, features)
    return parsed["x"], parsed["y"]

class Grow(keras.callbacks.Callback):
    only_on_rank_zero = True
    def on_epoch_end(self, epoch, logs=None):
        if grows:
            with (folder / "0.tfrecord").open("ab") as file:
                file.write(b"more")

trainer = None
try:
    source = hvdtrain.data.TFRecords(str(folder / "*.tfrecord*"), parse, cache_dir=folder / "cache")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options = {"batch_size": 4, "epochs": 3, "bad_samples": allowed, "callbacks": [Grow()]}
    trainer = hvdtrain.Trainer(model, source, **options)
    summary = trainer.fit()
    if topology.rank == 0:
        print("done with", summary["bad_samples"], "left out")
except Exception as error:
    end_job(error, collectives, None if trainer is None else trainer.step)
"""


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory):
    """A folder of TFRecord files for each thing that can be wrong with them."""
    import gzip

    import tensorflow as tf

    def write(path: Path, count: int, x_size: int = 2) -> None:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for i in range(count):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i] * x_size)),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 2])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())

    root = tmp_path_factory.mktemp("bad")
    for name in ("good", "truncated", "type", "gzip", "empty", "grows", "flipped"):
        (root / name).mkdir()
        write(root / name / "0.tfrecord", 20)
    whole = (root / "good" / "0.tfrecord").read_bytes()
    (root / "truncated" / "1.tfrecord").write_bytes(whole[:-5])
    write(root / "type" / "1.tfrecord", 1, x_size=3)
    (root / "gzip" / "1.tfrecord.gz").write_bytes(gzip.compress(whole)[:-20])
    (root / "empty" / "1.tfrecord").write_bytes(b"")
    (root / "flipped" / "1.tfrecord").write_bytes(whole[:120] + bytes([whole[120] ^ 1]) + whole[121:])
    return root


@pytest.mark.parametrize(
    ("name", "allowed", "code", "message"),
    [
        LONG("good", 0, 0, "done with 0 left out"),
        ("truncated", 0, 65, r"1\.tfrecord.*offset \d+"),
        LONG("truncated", 1, 0, "done with 1 left out"),
        LONG("type", 0, 65, r"1\.tfrecord, record 0 at offset 0 bytes"),
        ("type", 1, 0, "done with 1 left out"),
        LONG("flipped", 0, 65, r"1\.tfrecord, record \d at offset \d+ bytes: data checksum"),
        ("gzip", 0, 65, r"1\.tfrecord\.gz.*offset \d+"),
        LONG("empty", 0, 65, r"1\.tfrecord.*empty"),
        ("grows", 0, 65, r"0\.tfrecord.*\d+ bytes"),
    ],
)
def test_bad_records_end_every_rank_alike_or_are_left_out(name, allowed, code, message, bad_inputs, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RECORDS)
    command = [sys.executable, str(script), str(bad_inputs / name), str(allowed), name]
    job = run_job(command, ranks=2, timeout_s=60)
    assert job.code == code, job.output
    assert re.search(message, job.output), job.output
    assert "Traceback" not in job.output


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.stem not in ("own_task", "resume_after_kill")],
    ids=lambda path: path.stem,
)
def test_example(path):
    job = run_job([sys.executable, str(path)], ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    told_accuracy = re.findall(r"test accuracy ([\d.]+) after training on 2 rank", job.output)
    assert len(told_accuracy) == 1
    assert float(told_accuracy[0]) > 0.95


def test_example_of_a_task_of_ones_own(tmp_path):
    path = ROOT / "examples" / "own_task.py"
    assert len(path.read_text().splitlines()) < 40
    job = run_job([*TRAIN, "--task", str(path)], ranks=2, timeout_s=120, cwd=tmp_path)
    assert job.code == 0, job.output
    assert json.loads((tmp_path / "runs" / "own_task" / "summary.json").read_text())["eval"]["accuracy"] > 0.93


def test_example_of_a_run_that_is_killed():
    job = run_job(
        [sys.executable, str(ROOT / "examples" / "resume_after_kill.py")], ranks=1, launcher="", timeout_s=180
    )
    assert job.code == 0, job.output
    digests = re.findall(r"(?:without a break|killed and resumed): (\w{64})", job.output)
    assert len(digests) == 2
    assert digests[0] == digests[1]


def test_evaluation_as_checkpoints_appear(tmp_path):
    """In a job of its own, while the run goes on; it ends with the run's last checkpoint."""
    run_dir = tmp_path / "run"
    train = Job([*TRAIN, "--run-dir", str(run_dir), "--steps", "120", "--checkpoint-every", "40"], ranks=2)
    while not (run_dir / "config.json").exists():
        time.sleep(0.1)
    job = run_job([*TRAIN, "eval", "--run-dir", str(run_dir), "--watch"], ranks=1, timeout_s=120)
    assert job.code == 0, job.output
    assert train.end(60).code == 0
    told_steps = [json.loads(line)["step"] for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert told_steps[-1] == 120
    assert told_steps == sorted(set(told_steps))


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


def test_a_line_is_found_within_one_that_horovod_writes_in_pieces():
    output = (
        "[0]<stderr>:[hvdtrain: rank 1 is gone\n[0]<stderr>:2026-01-01 00:00:00: E operations.cc:697] [0]: failed\n"
    )
    assert Finished(1, output).only_line_told == "hvdtrain: rank 1 is gone"
    for other in ("", output * 2):
        with pytest.raises(AssertionError):
            _ = Finished(1, other).only_line_told


def test_trying_settings_leaves_no_trace(tmp_path):
    """The run is that of the settings; and it goes on without trying them again."""
    folders = {name: tmp_path / name for name in ("tuned", "straight")}
    for name, *more in (
        ("tuned", "--steps", "20", "--autotune"),
        ("tuned", "--steps", "30"),
        ("straight", "--steps", "30"),
    ):
        job = run_job([*TRAIN, *more, "--run-dir", str(folders[name])], ranks=2, timeout_s=120)
        assert job.code == 0, job.output
        if "--autotune" in more:
            (line,) = (line for line in job.output.splitlines() if "autotune: " in line)
            config = json.loads((folders[name] / "config.json").read_text())
            assert f"autotune: --steps-per-call {config['steps_per_call']}, --groups" in line
            assert line.count(" ms") == 5
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders.values()]
    assert found[0]["resumed_from"] == 20
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_bench(tmp_path):
    """All ranks, and the first alone; nothing of a machine that is not steady."""
    line = [*TRAIN, "bench", "--output", str(tmp_path), "--blocks", "4", "--block-seconds", "0.2"]
    unsteady = run_job([*line, "--max-spread", "1e-9"], ranks=2, timeout_s=120)
    assert unsteady.code == 1, unsteady.output
    reason = unsteady.only_line_told
    assert "ms a step" in reason
    assert "Nothing is reported." in reason
    assert not list(tmp_path.iterdir())
    line += ["--max-spread", "100", "--average-every", "5", "--predict", "2"]
    job = run_job(line, ranks=2, timeout_s=120)
    assert job.code == 0, job.output
    found = json.loads((tmp_path / "bench.json").read_text())
    ranks = {name: case["ranks"] for name, case in found["cases"].items()}
    assert ranks == {"one rank alone": 1, "no communication": 2, "sync": 2, "local": 2}
    assert found["ratios"].keys() == {
        "no communication over one rank alone",
        "sync over no communication",
        "local over no communication",
    }
    assert found["steps_of_a_measurement"] % 5 == 0
    assert sum(found["shares"][f"{name}_fraction"] for name in ("input", "compute", "communication")) >= 0.99
    assert found["shares"]["communication_fraction"] > 0
    assert all(row["over_mpi"] > 0 for row in found["network"]["allreduce"])
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert job.output.count("one rank alone") == 2
    assert "predicted, not run:" in job.output
    predicted = found["prediction"]
    assert [(row["ranks"], row["mode"]) for row in predicted["rows"]] == [(2, "sync"), (2, "local")]
    assert sum(size for size, _ in predicted["messages"]) == 4 * found["parameters"]
    assert all(0 < share <= 1 for _, share in predicted["messages"])
