"""Jobs with bad input end with their exit code and one message, and leave nothing behind."""

import re
import sys
from pathlib import Path

import pytest
from launcher import LONG, ROOT, run_commands, run_job

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "hvdtrain"]


@pytest.fixture
def occupied(tmp_path) -> Path:
    folder = tmp_path / "occupied"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return folder


def test_bad_input_is_reported_once_and_leaves_nothing(occupied, tmp_path):
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
        (["--bach-size", "3"], 64, "Unknown option: --bach-size. Did you mean --batch-size?"),
    ]
    found = run_commands([line for line, *_ in expected], ranks=2, folder=tmp_path / "output", timeout_s=120)
    for done, (line, code, message) in zip(found, expected, strict=True):
        assert done.code == code, (line, done.output)
        assert message in done.only_message, line
        traceback = f'File "{own_task}"' if own_task in line else None
        assert done.output.count("Traceback") == (traceback is not None), (line, done.output)
        assert traceback is None or traceback in done.output
    assert not run_dir.exists()
    assert not list(empty.iterdir())
    assert [path.name for path in occupied.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        LONG(["--task", "nothing"], 64, "--task must name a task (digits, "),
        LONG(["--run-dir", "{occupied}"], 65, "which holds something else"),
        # Ranks with different command lines: for mpirun, separated by colons.
        (
            ["--seed", "1", ":", "-np", "1", *TRAIN, "--seed", "2", "--run-dir", "{run}"],
            78,
            "--seed: 1 on rank 0, 2 on",
        ),
        ([":", "-np", "1", *TRAIN, "--steps", "x", "--run-dir", "{run}"], 64, "--steps must be a whole number"),
    ],
)
def test_a_job_with_bad_input_ends_with_its_exit_code(arguments, code, message, occupied, tmp_path):
    run_dir = tmp_path / "run"
    filled = [argument.format(occupied=occupied, run=run_dir) for argument in arguments]
    ranks = 1 if ":" in arguments else 2
    where = [] if "--run-dir" in arguments and ":" not in arguments else ["--run-dir", str(run_dir)]
    job = run_job([*TRAIN, *where, *filled], ranks=ranks, timeout_s=60)
    assert job.code == code, job.output
    assert message in job.only_message
    assert "Traceback" not in job.output
    assert not run_dir.exists()
    assert [path.name for path in occupied.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(("launcher", "code"), [("mpirun", 1), LONG("horovodrun --gloo", 1)])
def test_non_finite_training_is_ended_by_all_ranks_and_reported_once(launcher, code, tmp_path):
    job = run_job(
        [*TRAIN, "--optimizer", "sgd", "--learning-rate", "1e30", "--run-dir", str(tmp_path / "run")],
        ranks=2,
        launcher=launcher,
        timeout_s=90,
    )
    assert job.code == code, job.output
    assert re.search(r"At step \d+: (the loss|the gradient of .*) on rank \d", job.only_message)
    assert not (tmp_path / "run" / "model.keras").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


RECORDS = """
import sys
import hvdtrain
topology = hvdtrain.init(seed=0)
import keras, tensorflow as tf
from pathlib import Path
from hvdtrain.distributed import runtime
from hvdtrain.fault_tolerance.shutdown import end_job
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
    config = hvdtrain.TrainConfig(batch_size=4, epochs=3, guards=hvdtrain.GuardConfig(bad_samples=allowed))
    trainer = hvdtrain.Trainer(model, source, config, callbacks=[Grow()])
    summary = trainer.fit()
    if topology.rank == 0:
        print("done with", summary["bad_samples"], "skipped")
except Exception as error:
    end_job(error, collectives, None if trainer is None else trainer.step)
"""


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory):
    """A folder of TFRecord files for each kind of damage."""
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
        LONG("good", 0, 0, "done with 0 skipped"),
        ("truncated", 0, 65, r"1\.tfrecord.*offset \d+"),
        LONG("truncated", 1, 0, "done with 1 skipped"),
        LONG("type", 0, 65, r"1\.tfrecord, record 0 at offset 0 bytes"),
        ("type", 1, 0, "done with 1 skipped"),
        LONG("flipped", 0, 65, r"1\.tfrecord, record \d at offset \d+ bytes: wrong data checksum"),
        LONG("gzip", 0, 65, r"1\.tfrecord\.gz.*offset \d+"),
        LONG("empty", 0, 65, r"1\.tfrecord.*empty"),
        ("grows", 0, 65, r"0\.tfrecord.*\d+ bytes"),
    ],
)
def test_bad_records_end_all_ranks_or_are_skipped(name, allowed, code, message, bad_inputs, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RECORDS)
    command = [sys.executable, str(script), str(bad_inputs / name), str(allowed), name]
    job = run_job(command, ranks=2, timeout_s=60)
    assert job.code == code, job.output
    assert re.search(message, job.output), job.output
    assert "Traceback" not in job.output
