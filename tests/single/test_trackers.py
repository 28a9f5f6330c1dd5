"""Loggers that --loggers names: CSV files, MLflow and Weights & Biases with their own libraries, without a server."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.loggers import names
from hvdtrain.loggers.config import LoggingConfig
from hvdtrain.loggers.csv_file import CsvReporter
from hvdtrain.loggers.mlflow import MLflowReporter
from hvdtrain.loggers.reporter import CompositeReporter, RunShape
from hvdtrain.loggers.wandb import WandbReporter

SUMMARY = {"steps": 20, "loss": 0.25, "task": "digits", "eval": {"loss": 0.5}, "bad": float("nan")}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_columns_grow_and_resumed_runs_continue(tmp_path):
    first = CsvReporter(tmp_path)
    first.started({}, RunShape(30, 10))
    first.progressed(10, {"loss": 1.5})
    first.progressed(20, {"loss": 0.5, "skipped, of all": 2.0})
    first.evaluated(20, {"loss": 0.75})
    assert rows(tmp_path / "train.csv") == [
        {"step": "10", "loss": "1.5", "skipped, of all": ""},
        {"step": "20", "loss": "0.5", "skipped, of all": "2.0"},
    ]
    assert rows(tmp_path / "eval.csv") == [{"step": "20", "loss": "0.75"}]
    with (tmp_path / "train.csv").open("a") as file:
        file.write("3")  # killed while writing
    second = CsvReporter(tmp_path)
    second.started({}, RunShape(30, 10, resumed_step=10))
    second.progressed(20, {"loss": 0.25})
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "train.csv")] == [("10", "1.5"), ("20", "0.25")]
    assert rows(tmp_path / "eval.csv") == []


@pytest.fixture
def tracking_server(tmp_path, monkeypatch):
    """A file in place of MLflow's server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)
    return mlflow.MlflowClient


@pytest.mark.slow
def test_mlflow_run_is_continued(tmp_path, tracking_server):
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    stopped = MLflowReporter(run_dir, {"batch_size": 32, "text": "x" * 10_000, **{f"o{i}": i for i in range(150)}})
    stopped.started({}, RunShape(20, 10))
    stopped.progressed(10, {"loss": 1.5, "examples/s": 100.0})
    stopped.close()
    run_id = (run_dir / "mlflow-run.txt").read_text().strip()
    client = tracking_server()
    assert client.get_run(run_id).info.status == "FAILED"
    resumed = MLflowReporter(run_dir, {"batch_size": 64})
    resumed.started({}, RunShape(20, 10, resumed_step=10))
    assert client.get_run(run_id).info.status == "RUNNING"
    resumed.progressed(20, {"loss": 0.5})
    resumed.evaluated(20, {"loss": 0.75})
    resumed.finished(SUMMARY)
    resumed.close()
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "my run")
    assert client.get_experiment(run.info.experiment_id).name == "from the environment"
    assert run.data.params["batch_size"] == "32"
    assert run.data.params["o149"] == "149"
    history = client.get_metric_history(run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(10, 1.5), (20, 0.5)]
    assert run.data.metrics["eval/loss"] == 0.75
    assert run.data.metrics["summary/loss"] == 0.25
    assert "summary/bad" not in run.data.metrics
    assert run.data.tags["task"] == "digits"


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys, tracking_server):
    def fail(*arguments, **options):
        raise mlflow.exceptions.MlflowException("the server is down\nand more lines")

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", fail)
    csv_reporter = CsvReporter(tmp_path)
    reporter = CompositeReporter([MLflowReporter(tmp_path), csv_reporter])
    reporter.started({}, RunShape(20, 10))
    reporter.progressed(10, {"loss": 1.5})
    reporter.finished(SUMMARY)
    reporter.close()
    printed = "".join(capsys.readouterr())
    message = "MLflowReporter cannot write: MlflowException: the server is down. Training continues."
    assert printed.count(message) == 1, printed
    assert rows(tmp_path / "train.csv") == [{"step": "10", "loss": "1.5"}]


@pytest.mark.slow
def test_wandb_offline_run_is_continued(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    ids = []
    for resumed_step in (0, 10):
        reporter = WandbReporter(run_dir, {"batch_size": 32})
        reporter.started({}, RunShape(20, 10, resumed_step=resumed_step))
        reporter.progressed(resumed_step + 10, {"loss": 0.123456})
        reporter.evaluated(resumed_step + 10, {"loss": 0.5})
        reporter.finished(SUMMARY)
        reporter.close()
        ids.append((run_dir / "wandb-run.txt").read_text())
    assert ids[0] == ids[1]
    files = [*(run_dir / "wandb").glob("offline-run-*/run-*.wandb")]
    assert {path.stem for path in files} == {f"run-{ids[0].strip()}"}
    content = b"".join(path.read_bytes() for path in files)
    for text in (b"train/loss", b"0.123456", b"eval/loss", b"batch_size", b"my run"):
        assert text in content, text


def test_the_names_of_loggers(tmp_path, monkeypatch):
    assert [
        type(each).__name__ for each in names.make_loggers(names.logger_names("csv, mlflow,csv"), tmp_path, {})
    ] == [
        "CsvReporter",
        "MLflowReporter",
    ]
    assert names.logger_names(None) == []
    with pytest.raises(UsageError, match="must be a list of csv, mlflow, wandb"):
        LoggingConfig(loggers="csv,mlfow")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=re.escape("HVDTRAIN_EXTRAS=wandb launch/run …, or pip install 'hvdtrain[wandb]'")
    ):
        LoggingConfig(loggers="wandb")


@pytest.mark.slow
def test_loggers_of_a_run(tmp_path):
    """One rank, the real command line: rows equal those of metrics.jsonl."""
    command = [sys.executable, "-m", "hvdtrain", "--steps", "4", "--log-every", "2", "--loggers", "csv,mlflow"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["event"] == "train"]
    written = rows(tmp_path / "run" / "train.csv")
    assert [int(row["step"]) for row in written] == [2, 4]
    assert [float(row["loss"]) for row in written] == [line["loss"] for line in trained]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run((tmp_path / "run" / "mlflow-run.txt").read_text().strip())
    assert run.info.status == "FINISHED"
    assert run.data.metrics["train/loss"] == trained[-1]["loss"]
    assert run.data.params["batch_size"] == "32"
