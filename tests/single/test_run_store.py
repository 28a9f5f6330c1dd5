"""A run directory in an object store: its small files follow the checkpoints, and the store decides what the run is."""

import json

import keras
import pytest

from hvdtrain.commands import cli
from hvdtrain.commands.run_directory import OwnedRunDirectory, open_run_directory
from hvdtrain.errors import DataError, StoreError
from hvdtrain.runs.run_files import EVALUATIONS, open_run_files
from hvdtrain.stores.store import Store


def claimed(url, resume="auto"):
    directory = open_run_directory(0, url)
    directory.claim(resume)
    return directory


def small_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def uploads(monkeypatch):
    """The names of what is uploaded, in order."""
    names = []
    upload = Store.upload

    def recorded(self, path, name):
        names.append(name)
        upload(self, path, name)

    monkeypatch.setattr(Store, "upload", recorded)
    return names


def test_what_has_changed_is_uploaded_and_the_summary_last(url, cache, uploads):
    directory = claimed(url)
    assert not Store(url).files(), "nothing is written before the run begins"
    directory.write_config({"seed": 1})
    directory.reporter.progressed(1, {"loss": 0.5})
    directory.publish()
    directory.publish()
    (events,) = [name for name in uploads if name.startswith("tensorboard/")]
    assert uploads == ["config.json", "metrics.jsonl", events]
    directory.finish(small_model(), {"steps": 1})
    assert uploads[3:] == ["model.keras", "summary.json"]
    Store(url).write(EVALUATIONS, b"{}\n")
    del directory  # and with it its lock

    other_disk = cache("empty disk")
    directory = claimed(url)
    assert directory.finished_run() == ({"seed": 1}, {"steps": 1})
    local = {each.relative_to(directory.path).as_posix() for each in directory.path.rglob("*") if each.is_file()}
    assert local == {".lock", "config.json", "summary.json", "metrics.jsonl", events}
    assert directory.path.is_relative_to(other_disk)
    uploads.clear()
    directory.publish_logs()
    assert uploads == []
    directory.write_config({"seed": 1, "steps": 2})
    assert set(Store(url).files()) == {"config.json", "metrics.jsonl", "model.keras", EVALUATIONS, events}


def test_files_follow_each_checkpoint_of_a_run(url, cache, uploads, restored_signals, monkeypatch):
    # What is uploaded when a job ends hides what was missing until then.
    monkeypatch.setattr(OwnedRunDirectory, "publish_logs", lambda self: None)
    options = ["--log-every", "1", "--checkpoint-every", "2", "--run-dir", url, "--seed", "3"]
    assert cli.main(["--steps", "2", *options]) == 0
    uploads.clear()
    cache("empty disk")
    assert cli.main(["--steps", "6", *options]) == 0
    marks = [name for name in uploads if name.endswith(("SHA256SUMS", "metrics.jsonl", "summary.json", "model.keras"))]
    first, second = (f"step-0000000{step}/SHA256SUMS" for step in (4, 6))
    # The second time, only if the lines of the last steps were not there the first time: uploads run in the background.
    logs = ["metrics.jsonl"] * (marks.count("metrics.jsonl") - 1)
    assert marks == [first, "metrics.jsonl", second, *logs, "model.keras", "summary.json"]
    assert b'"step": 6' in Store(url).read("metrics.jsonl")
    assert json.loads(Store(url).read("summary.json"))["resumed_from"] == 2


def test_the_store_decides(url, cache, capfd):
    directory = claimed(url)
    directory.write_config({"seed": 1})
    directory.finish(small_model(), {"steps": 1})
    path = directory.path
    (path / "stale.csv").write_text("1")
    Store(url).write("config.json", b'{"seed": 2}')
    del directory
    with pytest.raises(DataError, match=f"--resume never needs a new folder. Received: {url}, which holds a run"):
        claimed(url, "never")
    directory = claimed(url)
    assert directory.finished_run() == ({"seed": 2}, {"steps": 1})
    assert not (path / "stale.csv").exists()
    del directory
    for name in Store(url).files():
        Store(url).delete(name)
    with pytest.raises(DataError, match=f"--resume must needs a run with a checkpoint. Received: {url}, which hold"):
        claimed(url, "must")
    assert f"{url} holds no run: moved the local copy in {path} to {path.name}.aside" in capfd.readouterr().err
    assert json.loads((path.with_name(f"{path.name}.aside") / "config.json").read_text()) == {"seed": 2}
    assert claimed(url, "never").finished_run() is None


def test_a_run_below_another_one_keeps_its_files(url, cache, uploads):
    outer, inner = claimed(url), claimed(f"{url}/inner")
    for directory in (outer, inner):
        directory.write_config({})
    inner.reporter.progressed(1, {"loss": 0.5})
    uploads.clear()
    outer.publish()
    assert uploads == []
    del outer
    claimed(url)
    assert (inner.path / "metrics.jsonl").exists()
    assert not Store(f"{url}/inner").read("metrics.jsonl")


def test_what_no_run_wrote_is_left_untouched(url, cache):
    store = Store(url)
    store.write("thesis.txt", b"mine")
    with pytest.raises(DataError, match=rf"Received: {url}, which holds something else \(thesis.txt\). It was left un"):
        claimed(url)
    assert set(store.files()) == {"thesis.txt"}


def test_a_store_that_fails_is_named(url, cache, monkeypatch, capfd):
    directory = claimed(url)

    def failing(self, path, name):
        raise StoreError("no route to the store")

    directory.write_config({})
    directory.reporter.progressed(1, {"loss": 0.5})
    Store(url).write("checkpoints/writer.json", b"another job")
    directory.publish_logs()
    assert "metrics.jsonl" not in Store(url).files()
    Store(url).delete("checkpoints/writer.json")
    monkeypatch.setattr(Store, "upload", failing)
    directory.publish_logs()
    assert "the last lines of the run's logs could not be uploaded: no route" in capfd.readouterr().err
    with pytest.raises(DataError, match=f"--run-dir must be a folder that can be written. Received: {url}"):
        directory.write_config({"seed": 1})
    with pytest.raises(DataError, match=f"the trained model must be writable to {url}"):
        directory.finish(small_model(), {"steps": 1})
    with open_run_files(url) as files:
        files.path_of(EVALUATIONS).write_text("{}")
        files.upload(EVALUATIONS)
    assert f"{url}/{EVALUATIONS} cannot be written: no route" in capfd.readouterr().err
