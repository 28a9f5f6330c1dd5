"""What a job tells launch/run --restarts, from several processes at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import process
from hvdtrain.supervised import note_checkpoint, note_exit_code, note_listener

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    monkeypatch.setenv("HVDTRAIN_SUPERVISOR_FILE", str(path))
    return path


def test_what_was_told_before_stays(file):
    note_checkpoint(10)
    note_listener()
    note_checkpoint(20)
    note_exit_code(75)
    assert json.loads(file.read_text()) == {"checkpoint_step": 20, "listener": os.getpid(), "exit_code": 75}


@pytest.mark.parametrize(("codes", "told"), [((65, 1), 65), ((65, 70), 65), ((1, 65), 65), ((1,), 1)])
def test_the_code_of_the_cause_is_kept(file, codes, told):
    for code in codes:
        note_exit_code(code)
    assert json.loads(file.read_text())["exit_code"] == told


def test_without_a_supervisor_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.delenv("HVDTRAIN_SUPERVISOR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert process.supervisor_file() is None
    note_checkpoint(1)
    assert list(tmp_path.iterdir()) == []


def test_on_another_host_nothing_happens(file, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_SUPERVISOR_FILE", str(file.parent / "not here" / "job.json"))
    note_checkpoint(1)
    note_exit_code(1)
    assert list(file.parent.iterdir()) == []


def test_ranks_that_tell_at_the_same_time_all_are_heard(file):
    script = "from hvdtrain import supervised\nfor step in range(200): supervised.{}\n"
    told = ("note_checkpoint(step)", "note_checkpoint(step)", "note_listener()", "note_exit_code(65)")
    ranks = [subprocess.Popen([sys.executable, "-c", script.format(each)], cwd=ROOT) for each in told]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    assert json.loads(file.read_text()) == {"checkpoint_step": 199, "listener": ranks[2].pid, "exit_code": 65}


@pytest.mark.parametrize(("value", "number"), [(None, 0), ("0", 0), ("3", 3), ("soon", 0), ("", 0)])
def test_the_number_of_the_restart(monkeypatch, value, number):
    monkeypatch.delenv("HVDTRAIN_RESTART", raising=False)
    if value is not None:
        monkeypatch.setenv("HVDTRAIN_RESTART", value)
    assert process.restart_number() == number
