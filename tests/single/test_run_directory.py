"""A run never overwrites what it did not write."""

import json
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import run_directory
from hvdtrain.errors import DataError
from hvdtrain.report import Reporter, SeveralReporters
from hvdtrain.run_directory import NoRunDirectory, open_run_directory


def test_only_rank_0_owns_a_folder(tmp_path):
    other = open_run_directory(1, tmp_path / "run")
    assert isinstance(other, NoRunDirectory)
    other.claim("auto")
    other.write_config({})
    assert other.finished_run() is None
    assert not (tmp_path / "run").exists()


def claimed(path, resume="auto"):
    directory = open_run_directory(0, path)
    directory.claim(resume)
    return directory


def test_what_a_folder_is_claimed_for(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(DataError, match="--resume must needs a run with a checkpoint"):
        claimed(path, "must")
    assert not path.exists()
    first = claimed(path, "never")
    first.write_config({"seed": 1})
    del first  # and with it its lock
    for resume in ("auto", "must") if (path / "checkpoints").exists() else ("auto",):
        claimed(path, resume)
    with pytest.raises(DataError, match=r"--resume never needs a new folder.*which holds a run.*left untouched"):
        claimed(path, "never")
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)
    claimed(path, "must")


def test_a_folder_is_one_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_LOCK_WAIT_S", 0.3)
    first = claimed(tmp_path / "run")
    with pytest.raises(DataError, match="to which another job writes"):
        claimed(tmp_path / "run", "auto")
    del first
    claimed(tmp_path / "run", "auto")


def test_a_finished_run_is_told_until_it_is_gone_on_with(tmp_path):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    assert directory.finished_run() is None
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    directory.finish(model, {"steps": 5})
    assert directory.finished_run() == ({"seed": 1}, {"steps": 5})
    assert np.array_equal(keras.saving.load_model(tmp_path / "run" / "model.keras").weights[0], model.weights[0])
    directory.write_config({"seed": 1})
    assert directory.finished_run() is None


def test_a_model_that_cannot_be_written(tmp_path, monkeypatch):
    directory = claimed(tmp_path / "run")

    class Full:
        def save(self, path):
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"must be writable.*No space left.*start the job again"):
        directory.finish(Full(), {"steps": 5})


def test_what_happens_is_told_on_the_console_and_in_files(tmp_path, capsys):
    path = tmp_path / "run"
    directory = claimed(path)
    directory.reporter.progressed(10, {"loss": 0.25})
    directory.reporter.evaluated(10, {"loss": 0.5})
    directory.reporter.progressed(20, {"loss": 0.125})
    directory.reporter.resumed(10, path / "checkpoints" / "step-00000010")
    directory.reporter.complete(10, path)
    directory.reporter.close()
    told = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in told[:3]] == [
        "step 10  loss 0.25",
        "step 10  evaluation: loss 0.5",
        "step 20  loss 0.125",
    ]
    assert told[3].endswith(f"step 10  goes on from {path}/checkpoints/step-00000010")
    assert "holds this run, complete: 10 steps. Nothing was trained." in told[4]
    events = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [(each["event"], each["step"]) for each in events] == [("train", 10), ("eval", 10), ("resume", 10)]
    assert sorted(folder.name for folder in (path / "tensorboard").iterdir()) == ["eval", "train"]


def test_a_log_that_cannot_be_written_is_told_once_and_costs_no_run(capfd):
    class Full(Reporter):
        def progressed(self, step, values):
            raise OSError(28, "No space left on device")

        def evaluated(self, step, values):
            raise tf.errors.ResourceExhaustedError(None, None, "no room")

    class Heard(Reporter):
        steps: ClassVar[list[int]] = []

        def progressed(self, step, values):
            self.steps.append(step)

    both = SeveralReporters([Reporter(), Full(), Heard()])
    both.progressed(1, {})
    both.progressed(2, {})
    both.evaluated(2, {})
    assert Heard.steps == [1, 2]
    assert capfd.readouterr().err.count("Full cannot write: [Errno 28] No space left on device. Training goes on.") == 1
    with pytest.raises(OSError, match="No space"):  # the console: nobody would hear of anything any more
        SeveralReporters([Full()]).progressed(1, {})


@pytest.mark.parametrize("kind", ["foreign files", "foreign checkpoints", "a file", "below a file"])
def test_what_is_not_ours_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "place"
    if kind == "foreign files":
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    elif kind == "foreign checkpoints":
        (path / "checkpoints").mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "checkpoints" / "thesis.txt").write_text("mine")
    else:
        path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"--run-dir must be|checkpoints must go to") as caught:
        claimed(path / "run" if kind == "below a file" else path)
    assert caught.value.exit_code == 65
    assert sorted(tmp_path.rglob("*")) == before
