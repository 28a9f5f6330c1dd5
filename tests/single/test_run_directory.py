"""The run directory: a run never overwrites what it did not write."""

import json
import os
import shutil
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_checkpoints import checkpointer

from hvdtrain.commands import run_directory, trained_run
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.run_directory import NoRunDirectory, open_run_directory
from hvdtrain.commands.trained_run import has_ended
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DataError, JobError
from hvdtrain.loggers.reporter import CompositeReporter, Reporter, RunShape
from hvdtrain.runs.run_files import RunFiles
from hvdtrain.system import atomic_files


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


def test_resume_decides_which_folders_can_be_claimed(tmp_path):
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


def test_a_folder_is_used_by_one_job_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT_S", 0.3)
    first = claimed(tmp_path / "run")
    with pytest.raises(DataError, match=r"to which another job has been writing for 0\.3 s"):
        claimed(tmp_path / "run", "auto")
    del first
    claimed(tmp_path / "run", "auto")


@pytest.mark.parametrize("name", [".lock", "config.json", "summary.json", "metrics.jsonl"])
def test_no_fifo_is_waited_for(name, tmp_path, capfd):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    (tmp_path / "run" / "summary.json").write_text('{"steps": 5}')
    del directory
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    if name == ".lock":
        with pytest.raises(DataError, match="not a regular file"):
            claimed(tmp_path / "run")
        return
    directory = open_run_directory(0, tmp_path / "run")
    if name == "metrics.jsonl":
        directory.reporter.progressed(1, {"loss": 0.5})
        directory.reporter.started({}, RunShape(30, 10))
        assert "JsonLinesReporter cannot write" in capfd.readouterr().err
    else:
        assert directory.finished_run() is None


class Clock:
    """Time that passes only in :meth:`sleep`, which calls a function once a time is reached."""

    def __init__(self, at_s, call):
        self.now_s, self._at_s, self._call = 0.0, at_s, call

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        if self.now_s >= self._at_s:
            self._call()


@pytest.mark.parametrize("saves_for_s", [25, 310])
def test_a_restarted_job_waits_for_the_end_of_its_earlier_start(saves_for_s, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HVDTRAIN_RESTART", "1")
    earlier = [claimed(tmp_path / "run")]
    clock = Clock(saves_for_s, earlier.clear)
    monkeypatch.setattr(run_directory, "time", clock)
    if saves_for_s < 300:
        claimed(tmp_path / "run")
        assert clock.now_s == pytest.approx(saves_for_s, abs=0.2)
    else:
        with pytest.raises(DataError, match="to which another job has been writing for 300 s"):
            claimed(tmp_path / "run")
    assert capfd.readouterr().err.count("waiting up to 300 s for its end") == 1


def test_a_run_is_finished_until_it_is_resumed(tmp_path):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    assert directory.finished_run() is None
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    directory.finish(model, {"steps": 5})
    assert directory.finished_run() == ({"seed": 1}, {"steps": 5})
    assert np.array_equal(keras.saving.load_model(tmp_path / "run" / "model.keras").weights[0], model.weights[0])
    directory.write_config({"seed": 1})
    assert directory.finished_run() is None


@pytest.mark.parametrize("name", [".writing-config.json", ".config.json.writing"])
def test_a_start_that_was_killed_while_it_wrote_leaves_a_new_folder(name, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").touch()
    (path / name).write_text('{"seed"')
    directory = claimed(path, "never")
    directory.write_config({"seed": 1})
    assert json.loads((path / "config.json").read_text()) == {"seed": 1}


def test_a_full_disk_at_the_start_is_reported_and_the_folder_stays_usable(tmp_path, monkeypatch):
    directory = claimed(tmp_path / "run")

    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "sync", full)
        with pytest.raises(DataError, match=r"--run-dir must be a folder that can be written.*No space left.*again"):
            directory.write_config({"seed": 1})
    del directory
    claimed(tmp_path / "run").write_config({"seed": 1})


DAMAGED = {
    "empty": b"",
    "truncated": b'{"steps": 5',
    "null": b"null",
    "a list": b"[5]",
    "bytes that are no text": b"\xff\xfe",
    "deep nesting": b"[" * 100_000,
    "a folder": None,
}


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_summary_or_configuration_means_an_incomplete_run(name, kind, tmp_path, capfd):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    (tmp_path / "run" / "summary.json").write_text('{"steps": 5}')
    path = tmp_path / "run" / name
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    else:
        path.write_bytes(DAMAGED[kind])
    assert directory.finished_run() is None
    assert f"{path} cannot be read" in capfd.readouterr().err
    if kind != "a folder" or name == "summary.json":
        directory.write_config({"seed": 2})
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 2}


def test_a_summary_of_wrong_types_means_an_incomplete_run(tmp_path):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    (tmp_path / "run" / "summary.json").write_text('{"steps": null}')
    assert directory.finished_run() is None
    assert not has_ended(tmp_path / "run" / "summary.json", 5)
    (tmp_path / "run" / "summary.json").write_text("5")
    assert not has_ended(tmp_path / "run" / "summary.json", 5)


def opened_config(path) -> RunConfig:
    return trained_run.open_run(RunFiles(path), "digits", None, SingleProcessCollectives()).config


def test_a_damaged_configuration_is_read_from_the_latest_intact_checkpoint(tmp_path, capfd):
    path = tmp_path / "run"
    path.mkdir()
    for step, seed in ((1, 5), (2, 6)):
        saver = checkpointer(path / "checkpoints", facts={"config": {"seed": seed, "learning_rate": 0.1, "unknown": 1}})
        saver.restore()
        saver.save(step, wait=True)
    for content in (None, b"{"):
        if content is not None:
            (path / "config.json").write_bytes(content)
        assert opened_config(path).training.seed == 6
        assert "used the configuration in" in capfd.readouterr().err
    (path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    assert opened_config(path).training.seed == 5
    (path / "config.json").write_text('{"seed": "many"}')
    with pytest.raises(JobError, match=r"config.json must hold the options of a run.*seed must be a whole number"):
        opened_config(path)


@pytest.mark.parametrize("task", ["/home/other/task.py", "package.module:TASK", 5])
def test_the_code_of_another_users_run_is_executed_only_if_it_is_named(task, tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"task": task}))
    assert trained_run.read_config(RunFiles(tmp_path), "digits") == {"task": task}
    monkeypatch.setattr(os, "geteuid", lambda: config.stat().st_uid + 1)
    with pytest.raises(DataError, match=r"task of another user's run must be named.* belongs to user ID .*--task"):
        trained_run.read_config(RunFiles(tmp_path), "digits")
    assert trained_run.read_config(RunFiles(tmp_path), task) == {"task": task}
    config.write_text('{"task": "mnist"}')
    assert trained_run.read_config(RunFiles(tmp_path), "digits") == {"task": "mnist"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may do")
def test_a_manifest_or_a_link_of_another_user_names_no_code(tmp_path, capfd):
    (tmp_path / "checkpoints").mkdir()
    saver = checkpointer(tmp_path / "checkpoints", facts={"config": {"task": "/home/other/task.py"}})
    saver.restore()
    saver.save(1, wait=True)
    assert trained_run.read_config(RunFiles(tmp_path), "digits")["task"] == "/home/other/task.py"
    os.chown(tmp_path / "checkpoints" / "step-00000001" / "manifest.json", 12345, 12345)
    with pytest.raises(DataError, match=r"manifest\.json, which belongs to user ID 12345"):
        trained_run.read_config(RunFiles(tmp_path), "digits")
    # A file of one's own, to which another user's link leads.
    (tmp_path / "own.json").write_text('{"task": "/home/other/task.py"}')
    (tmp_path / "config.json").symlink_to(tmp_path / "own.json")
    os.chown(tmp_path / "config.json", 12345, 12345, follow_symlinks=False)
    with pytest.raises(DataError, match=r"config\.json, which belongs to user ID 12345"):
        trained_run.read_config(RunFiles(tmp_path), "digits")


def test_a_run_whose_folder_was_deleted_meanwhile_ends_complete(tmp_path, capfd):
    directory = claimed(tmp_path / "run")
    directory.write_config({"seed": 1})
    shutil.rmtree(tmp_path / "run")
    directory.reporter.progressed(10, {"loss": 0.25})
    assert "JsonLinesReporter cannot write" in capfd.readouterr().err
    directory.finish(keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)]), {"steps": 5})
    assert directory.finished_run() == ({"seed": 1}, {"steps": 5})


def test_a_model_that_cannot_be_written(tmp_path, monkeypatch):
    directory = claimed(tmp_path / "run")

    class Full:
        def save(self, path):
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"must be writable.*No space left.*restart the job"):
        directory.finish(Full(), {"steps": 5})


def test_events_are_reported_on_the_console_and_in_files(tmp_path, capsys):
    path = tmp_path / "run"
    directory = claimed(path)
    directory.reporter.progressed(10, {"loss": 0.25})
    directory.reporter.evaluated(10, {"loss": 0.5})
    directory.reporter.progressed(20, {"loss": 0.125})
    directory.reporter.started({}, RunShape(30, 10, resumed_step=10))
    directory.reporter.resumed(10, path / "checkpoints" / "step-00000010")
    directory.reporter.already_complete(10, path)
    directory.reporter.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in lines[:3]] == [
        "step 10  loss 0.25",
        "step 10  evaluation: loss 0.5",
        "step 20  loss 0.125",
    ]
    assert lines[3].endswith(f"step 10  resumed from {path}/checkpoints/step-00000010")
    assert f"run already complete: {path}, 10 steps. Nothing was trained." in lines[4]
    events = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [(each["event"], each.get("step")) for each in events] == [
        *[("train", 10), ("eval", 10)],
        *[("start", None), ("resume", 10)],
    ]
    assert sorted(folder.name for folder in (path / "tensorboard").iterdir()) == ["eval", "train"]


def test_a_log_that_cannot_be_written_is_reported_once_and_does_not_end_the_run(capfd):
    class Full(Reporter):
        def progressed(self, step, values):
            raise OSError(28, "No space left on device")

        def evaluated(self, step, values):
            raise tf.errors.ResourceExhaustedError(None, None, "no room")

    class Received(Reporter):
        steps: ClassVar[list[int]] = []

        def progressed(self, step, values):
            self.steps.append(step)

    both = CompositeReporter([Full(), Received()])
    both.progressed(1, {})
    both.progressed(2, {})
    both.evaluated(2, {})
    assert Received.steps == [1, 2]
    assert (
        capfd.readouterr().err.count("Full cannot write: [Errno 28] No space left on device. Training continues.") == 1
    )


@pytest.mark.parametrize("kind", ["foreign files", "foreign checkpoints", "a file", "below a file"])
def test_foreign_files_are_refused_and_untouched(tmp_path, kind):
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
