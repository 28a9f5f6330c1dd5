"""Jobs whose run and data are in an object store: they resume on another machine, and read what is there."""

import json
import shutil

import keras
import pytest
from launcher import run_commands
from s3_server import s3_server

from hvdtrain.checkpoint.folders import StoredFolder
from hvdtrain.commands import cli
from hvdtrain.stores.store import Store
from hvdtrain.tasks import sample_data

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket():
    with s3_server() as url:
        yield url


STOPPED_ONCE = """
import dataclasses
import os
import signal
from pathlib import Path

import keras

import hvdtrain
from hvdtrain.tasks.tabular import TASK as TABULAR


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 19 and hvdtrain.init().rank == 1 and Path(__file__).with_name("stop").exists():
            os.kill(os.getpid(), signal.SIGTERM)


TASK = dataclasses.replace(TABULAR, callbacks=lambda: [Stop()])
"""


def test_a_run_in_a_store_resumes_on_another_machine(bucket, tmp_path, monkeypatch):
    """Two ranks train on TFRecord files in the store, are stopped halfway, and resume with an empty disk."""
    sample_data.write("tabular", tmp_path / "data")
    data = Store(f"{bucket}/data")
    for file in (tmp_path / "data").iterdir():
        data.upload(file, f"nested/{file.name}")
    shutil.rmtree(tmp_path / "data")
    task = tmp_path / "own.py"
    task.write_text(STOPPED_ONCE)
    (tmp_path / "stop").touch()
    run, whole = f"{bucket}/runs/half", tmp_path / "whole"
    train = ["--task", task, "--data-dir", f"{bucket}/data", "--checkpoint-every", "8", "--keep", "2"]
    monkeypatch.setenv("HVDTRAIN_STORE_CACHE", str(tmp_path / "first machine"))
    (done,) = run_commands(
        [[*train, "--run-dir", run, "--steps", "40"]], ranks=2, folder=tmp_path / "first", timeout_s=120
    )
    assert done.code == 75, done.output
    store = Store(run)
    names, stopped_at = set(store.files()), StoredFolder(f"{run}/checkpoints").newest_step()
    assert 20 <= stopped_at < 40
    assert f"stopped at step {stopped_at} of 40 (SIGTERM on rank 1" in done.only_message
    assert {"config.json", "metrics.jsonl"} <= names
    assert not {"summary.json", "model.keras"} & names
    assert "checkpoints/step-00000016/SHA256SUMS" in names
    assert not any("step-00000008" in name for name in names)
    assert any(name.startswith("tensorboard/train/") for name in names)
    assert json.loads(store.read("config.json"))["data_dir"] == f"{bucket}/data"
    assert list((tmp_path / "first machine" / "index").iterdir())

    (tmp_path / "stop").unlink()
    shutil.rmtree(tmp_path / "first machine")
    monkeypatch.setenv("HVDTRAIN_STORE_CACHE", str(tmp_path / "second machine"))
    lines = [
        [*train, "--run-dir", whole, "--steps", "40"],
        [*train, "--run-dir", run, "--steps", "40"],
        [*train, "--run-dir", run, "--steps", "40"],
        ["eval", "--run-dir", run, "--task", task, "--watch"],
        ["export", "--run-dir", run, "--task", task, "--output", f"{bucket}/exported.keras"],
        [*train, "--run-dir", tmp_path / "from", "--steps", "44", "--resume", run],
        ["eval", "--run-dir", f"{bucket}/runs/nothing"],
        ["export", "--run-dir", run],
        [*train, "--run-dir", f"{bucket}/data", "--steps", "40"],
        [*train, "--run-dir", run, "--steps", "48", "--data-dir", f"{bucket}/nothing"],
        [*train, "--run-dir", "s3://no-such-bucket/run", "--steps", "40"],
    ]
    finished = run_commands(lines, ranks=2, folder=tmp_path / "second", timeout_s=180)
    for done in finished[:6]:
        assert done.code == 0, done.output
    resumed, uninterrupted = json.loads(store.read("summary.json")), json.loads((whole / "summary.json").read_text())
    assert resumed["resumed_from"] == stopped_at
    assert resumed["steps"] == 40
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    assert resumed["eval"] == uninterrupted["eval"]
    steps = [json.loads(line)["step"] for line in store.read("metrics.jsonl").splitlines() if b'"train"' in line]
    assert steps == [10, 20, 30, 40]
    local = tmp_path / "second machine" / "runs" / "s3" / run.removeprefix("s3://")
    assert store.read("metrics.jsonl") == (local / "metrics.jsonl").read_bytes()
    assert f"run already complete: {run}" in finished[2].output
    (evaluated,) = store.read("evaluations.jsonl").splitlines()
    assert json.loads(evaluated)["loss"] == pytest.approx(resumed["eval"]["loss"], rel=1e-6)
    assert f"{bucket}/exported.keras: the model of step 40" in finished[4].output
    Store(bucket).download("exported.keras", tmp_path / "exported.keras")
    assert keras.models.load_model(tmp_path / "exported.keras", compile=False).count_params() == 71
    assert json.loads((tmp_path / "from" / "summary.json").read_text())["resumed_from"] == 40
    foreign = f"{bucket}/data, which holds something else"
    messages = [
        f"--run-dir must be the folder of a run, with its config.json. Received: {bucket}/runs/nothing",
        f"must be named, because its code is executed. Received: {run}, which may belong to another user and names",
        f"--run-dir must be a new folder, or that of an earlier run. Received: {foreign}",
        f"there must be data. Received: {bucket}/nothing, which is neither a file nor a folder with files",
        "The specified bucket does not exist",
    ]
    for done, message in zip(finished[6:], messages, strict=True):
        assert done.code == 65, done.output
        assert message in done.only_message
    left = {each.name for each in (tmp_path / "second machine").iterdir()}
    assert left == {"data", "index", "partial", "reading", "runs", "versions"}
    assert not list((tmp_path / "second machine" / "reading").iterdir())
    assert cli.main(["compare", run, str(whole)]) == 0
    assert cli.main(["compare", f"{bucket}/runs/nothing"]) == 65
