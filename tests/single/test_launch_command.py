"""hvdtrain launch: number of ranks, options and command, and real jobs, also without launch/run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands import cli, launch
from hvdtrain.system import local_job

SHOW = """import json, os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK"))
open(f"{sys.argv[1]}.{rank}", "w").write(json.dumps(sys.argv[2:]))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("arguments", "own", "command"),
    [
        (["--np", "4", "train.py", "--np", "8"], ["--np", "4"], ["train.py", "--np", "8"]),
        (["-np", "4", "--gloo", "--", "python", "-m", "x"], ["--np", "4", "--gloo"], ["python", "-m", "x"]),
        (["-n", "2", "python", "--", "x"], ["--np", "2"], ["python", "--", "x"]),
        (["--np=2", "--mpi"], ["--np=2", "--mpi"], []),
        (["--np"], ["--np"], []),
    ],
)
def test_the_first_word_that_is_no_option_begins_the_command(arguments, own, command):
    assert launch.split_command(arguments) == (own, command)


@pytest.mark.parametrize(
    ("listed", "visible", "expected"),
    [
        ("GPU 0: H100\nGPU 1: H100\n", None, 2),
        ("GPU 0: H100\nGPU 1: H100\n", "1", 1),
        ("GPU 0: H100\nGPU 1: H100\n", "0,-1,1", 1),
        ("GPU 0: H100\n", "", 0),
        ("No devices were found\n", "0,1", 0),
    ],
)
def test_one_rank_for_each_gpu_that_is_visible(listed, visible, expected, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_job.count_gpus() == expected
    if expected:
        assert local_job.choose_ranks() == (expected, "one for each GPU")


def test_without_gpus_one_rank_for_each_core_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(local_job, "count_gpus", lambda: 0)
    for usable, physical, expected in ((4, 2, 2), (3, 8, 3), (128, 64, 8), (5, None, 5)):
        monkeypatch.setattr(local_job, "usable_cores", lambda usable=usable: usable)
        monkeypatch.setattr(local_job.psutil, "cpu_count", lambda logical, physical=physical: physical)
        assert local_job.choose_ranks()[0] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is missing. For example: hvdtrain launch --np 2 python -m hvdtrain"),
        (["--np", "0", "true"], "--np must be auto or a whole number of at least 1. Received: '0'"),
        (["--np", "many", "true"], "--np must be auto or a whole number of at least 1. Received: 'many'"),
        (["--mpi", "--gloo", "true"], "--mpi excludes --gloo"),
        (["--nnp", "2", "true"], "Unknown option: --nnp. Did you mean --np?"),
        (["no_such_program"], "must be a program on PATH or a .py file. Received: 'no_such_program'"),
        (["no_such.py"], "the program to start must exist. Received: 'no_such.py'"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, capsys):
    assert cli.main(["launch", *arguments]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_rank_cannot_start_a_job(monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert cli.main(["launch", "true"]) == 64
    assert "a rank of a job must not start another job. Received: a process that horovodrun" in capsys.readouterr().err


def test_horovod_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(local_job.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["launch", "true"]) == 1
    assert "hvdtrain-horovod must be installed for this Python. Received: a Python without it." in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--np", "2"], 0),
        pytest.param(["--np", "3", "--mpi"], 3, marks=pytest.mark.slow),
    ],
)
def test_a_program_runs_on_all_ranks(options, code, tmp_path):
    program, mark = tmp_path / "show.py", tmp_path / "mark"
    program.write_text(SHOW)
    # horovodrun would take --timeline for an abbreviation of its options.
    words = [str(program), str(mark), str(code), "--timeline", "a b", "--np", "7"]
    line = [sys.executable, "-m", "hvdtrain", "launch", *options, *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    ranks = int(options[1])
    assert f"hvdtrain launch: {ranks} rank(s): {program} " in done.stderr
    for rank in range(ranks if code == 0 else 1):
        assert json.loads(Path(f"{mark}.{rank}").read_text()) == [str(code), "--timeline", "a b", "--np", "7"]


@pytest.mark.slow
def test_an_environment_that_is_not_activated(tmp_path):
    program, mark = tmp_path / "show.py", tmp_path / "mark"
    program.write_text(SHOW)
    line = ["launch", "--np", "2", str(program), str(mark), "0", "--timeline"]
    code = f"import sys; from hvdtrain.commands.cli import main; sys.exit(main({line!r}))"
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [json.loads(Path(f"{mark}.{rank}").read_text()) for rank in range(2)] == [["0", "--timeline"]] * 2
