"""Reports to launch/run --restarts, also from several processes at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.system import environment
from hvdtrain.system.supervisor_client import note_checkpoint, note_exit_code, note_listener

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    monkeypatch.setenv("HVDTRAIN_SUPERVISOR_FILE", str(path))
    return path


def test_earlier_reports_are_kept(file):
    note_checkpoint(10)
    note_listener()
    note_checkpoint(20)
    note_exit_code(75)
    assert json.loads(file.read_text()) == {"checkpoint_step": 20, "listener": os.getpid(), "exit_code": 75}


@pytest.mark.parametrize(("codes", "expected"), [((65, 1), 65), ((65, 70), 65), ((1, 65), 65), ((1,), 1)])
def test_the_first_code_other_than_1_is_kept(file, codes, expected):
    for code in codes:
        note_exit_code(code)
    assert json.loads(file.read_text())["exit_code"] == expected


def test_does_nothing_without_a_supervisor(monkeypatch, tmp_path):
    monkeypatch.delenv("HVDTRAIN_SUPERVISOR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert environment.supervisor_file() is None
    note_checkpoint(1)
    assert list(tmp_path.iterdir()) == []


def test_does_nothing_on_another_host(file, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_SUPERVISOR_FILE", str(file.parent / "not here" / "job.json"))
    note_checkpoint(1)
    note_exit_code(1)
    assert list(file.parent.iterdir()) == []


def test_concurrent_reports_are_all_kept(file):
    script = "from hvdtrain.system import supervisor_client\nfor step in range(200): supervisor_client.{}\n"
    calls = ("note_checkpoint(step)", "note_checkpoint(step)", "note_listener()", "note_exit_code(65)")
    ranks = [subprocess.Popen([sys.executable, "-c", script.format(each)], cwd=ROOT) for each in calls]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    assert json.loads(file.read_text()) == {"checkpoint_step": 199, "listener": ranks[2].pid, "exit_code": 65}


@pytest.mark.parametrize(("value", "number"), [(None, 0), ("0", 0), ("3", 3), ("soon", 0), ("", 0)])
def test_restart_number(monkeypatch, value, number):
    monkeypatch.delenv("HVDTRAIN_RESTART", raising=False)
    if value is not None:
        monkeypatch.setenv("HVDTRAIN_RESTART", value)
    assert environment.restart_number() == number
