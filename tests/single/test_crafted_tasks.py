"""Crafted tasks and data files are refused."""

import struct

import numpy as np
import pytest

import hvdtrain
from hvdtrain.commands import building, cli
from hvdtrain.data import Arrays, Data
from hvdtrain.errors import DataError, UsageError
from hvdtrain.tasks import mnist, tables, text
from hvdtrain.tasks.task import Task

hvdtrain.init()
X = np.zeros((100, 3), np.float32)
FIELDS = {"model": lambda data: None, "data": lambda folder: Data(Arrays(X, X)), "loss": "mse"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("model", 5), ("data", None), ("loss", 3), ("metrics", ["accuracy"]), ("optimizer", [])],
        *[("defaults", [1]), ("defaults", {1: 2}), ("make_sample_data", "folder")],
    ],
)
def test_fields_of_a_task_have_types(name, value):
    with pytest.raises(UsageError, match=f"{name} of a task must be .* Received: "):
        Task(**{**FIELDS, name: value})


def test_a_task_that_ends_the_process_is_an_error(tmp_path, capfd, restored_signals):
    path = tmp_path / "my_task.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["--task", str(path), "--run-dir", str(tmp_path / "run")])
    assert caught.value.code == 1
    assert "hvdtrain: a task must not end the process. Received: sys.exit(0)" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["Optimizer", "optimizer", "LossScaleOptimizer"])
def test_a_class_that_is_no_optimizer_of_its_own_is_refused(name):
    task = Task(**FIELDS)
    config = building.with_task_defaults(cli.parse(None, ["--optimizer", name]), task)
    with pytest.raises(UsageError, match="--optimizer must be momentum or the name of a Keras optimizer"):
        building.make_optimizer(config, task, 0.1)


def test_an_idx_header_of_a_huge_array(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(struct.pack(">4I", 0x803, 1 << 31, 1 << 31, 4))  # 2^64 bytes
    with pytest.raises(DataError, match="the file size must match the header: 18446744073709551632 bytes"):
        mnist.read_idx(path, 0x803)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label,text\none,x,two\n", "each column must have its own name. Received: text, label, text"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', "texts must be valid Unicode. Received: .*line 1"),
        ("a.jsonl", "[" * 100_000 + "\n", "each line must be JSON. Received: .*line 1"),
        ("a.jsonl", '{"text": "a", "label": ' + "9" * 5_000 + "}\n", "each line must be JSON. Received: .*line 1"),
    ],
)
def test_crafted_tables(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        tables.read_rows([tmp_path / name], "text", "label")


def test_blank_texts(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text('text,label\n" ",x\n"",y\n')
    with pytest.raises(Exception, match="training texts must contain words") as caught:
        text.TASK.read_data(tmp_path)
    assert caught.value.exit_code == 65


def test_two_files_of_the_same_rows(tmp_path):
    for name in ("train.csv", "train.jsonl", "test.csv"):
        (tmp_path / name).write_text("text,label\na,x\n")
    with pytest.raises(DataError, match=r"must hold one file of train rows. Received: .*train.csv, .*train.jsonl"):
        text.TASK.read_data(tmp_path)
