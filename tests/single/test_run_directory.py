"""A run never overwrites what it did not write; a checkpoint is there whole or not at all."""

import hashlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import checkpoint
from hvdtrain.errors import DataError
from hvdtrain.run_directory import NoRunDirectory, open_run_directory


def compiled_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    return model


def test_only_rank_0_owns_a_folder(tmp_path):
    other = open_run_directory(1, tmp_path / "run")
    assert isinstance(other, NoRunDirectory)
    other.start({})
    assert not (tmp_path / "run").exists()


def test_earlier_runs_are_moved_aside(tmp_path, capsys):
    path = tmp_path / "run"
    for number in range(3):
        open_run_directory(0, path).start({"number": number})
    numbers = [json.loads((folder / "config.json").read_text())["number"] for folder in sorted(tmp_path.iterdir())]
    assert numbers == [2, 0, 1]  # run, run.1, run.2
    warning = json.loads((path / "metrics.jsonl").read_text())
    assert (warning["event"], warning["step"]) == ("warning", 0)
    assert warning["text"] == f"{path} held an earlier run, which was moved to {path}.2"
    assert capsys.readouterr().out.count("warning: ") == 2


def test_what_happens_is_told_on_the_console_and_in_files(tmp_path, capsys):
    path = tmp_path / "run"
    directory = open_run_directory(0, path)
    directory.start({})
    directory.reporter.progressed(10, {"loss": 0.25})
    directory.reporter.evaluated(10, {"loss": 0.5})
    directory.reporter.close()
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "step 10  loss 0.25",
        "step 10  evaluation: loss 0.5",
    ]
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2
    assert sorted(folder.name for folder in (path / "tensorboard").iterdir()) == ["eval", "train"]


@pytest.mark.parametrize("kind", ["foreign files", "a file", "below a file"])
def test_what_is_not_ours_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "place"
    if kind == "foreign files":
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    else:
        path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="--run-dir must be") as caught:
        open_run_directory(0, path / "run" if kind == "below a file" else path).start({})
    assert caught.value.exit_code == 65
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_can_be_read_by_tensorflow_and_names_its_hashes(tmp_path):
    model = compiled_model()
    folder = checkpoint.write_checkpoint(tmp_path, model, {"step": 12})
    assert folder.name == "step-00000012"
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, expected in manifest["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    other = compiled_model()
    for variable in [*other.weights, *other.optimizer.variables]:
        variable.assign(tf.zeros_like(variable.value))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(str(folder / "state")).assert_consumed()
    pairs = zip([*model.weights, *model.optimizer.variables], [*other.weights, *other.optimizer.variables], strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def test_a_failed_write_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    model = compiled_model()
    folder = checkpoint.write_checkpoint(tmp_path, model, {"step": 3})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_checkpoint(tmp_path, model, {"step": 3})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["step-00000003"]
