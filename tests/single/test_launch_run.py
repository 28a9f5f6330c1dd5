"""launch/run with a made-up uv, so that its rules can be tested without building anything."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Makes what the real one makes, in a second, and counts its calls.
FAKE_UV = """#!/bin/sh
echo "$1" >> "$UV_CALLS"
case $1 in
    venv) mkdir -p "$6/bin" && ln -sf "$5" "$6/bin/python" ;;
    pip) sleep 1; [ -z "$UV_FAILS_WITH" ] || { echo "$UV_FAILS_WITH"; exit 2; } ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what launch/run needs, in a folder with a space in its name."""
    folder = tmp_path / "a check out"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uv").write_text(FAKE_UV)
    (tools / "uv").chmod(0o755)
    return folder


def environment(checkout: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN", "VIRTUAL_ENV"))}
    env["PATH"] = f"{checkout.parent / 'tools'}{os.pathsep}{env['PATH']}"
    env["UV_CALLS"] = str(checkout.parent / "calls")
    env["UV_FAILS_WITH"] = ""
    env["HVDTRAIN_PYTHON"] = sys.executable
    return {**env, **more}


def run(checkout: Path, *command: str, script: Path | None = None, stdin: str = "", **more: str):
    return subprocess.run(
        [str(script or checkout / "launch" / "run"), *command],
        env=environment(checkout, **more),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


def calls(checkout: Path) -> list[str]:
    path = checkout.parent / "calls"
    return path.read_text().split() if path.exists() else []


def test_makes_the_environment_once_and_runs_the_command_in_it(checkout):
    first = run(
        checkout, "python", "-c", "import sys; print(sys.stdin.read(), sys.argv[1]); sys.exit(7)", "a b", stdin="in"
    )
    assert first.returncode == 7
    assert first.stdout == "in a b\n"
    assert "the environment is ready" in first.stderr
    second = run(checkout, "sh", "-c", "echo $VIRTUAL_ENV; command -v python; command -v horovodrun")
    assert second.stderr == ""
    programs = (".venv/bin/python", "launch/bin/horovodrun")
    assert second.stdout.splitlines() == [str(checkout / each) for each in (".venv", *programs)]
    assert calls(checkout) == ["venv", "pip"]


@pytest.mark.parametrize("change", ["file", "setting"])
def test_makes_the_environment_anew_when_what_it_is_made_from_changes(checkout, change):
    assert run(checkout, "true").returncode == 0
    more = {}
    if change == "file":
        pins = checkout / "pyproject.toml"
        pins.write_text(pins.read_text().replace('"numpy>=1.26,<3"', '"numpy>=1.26.1,<3"'))
    else:
        more = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert run(checkout, "true", **more).returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2
    # A setting stays in force without being mentioned again.
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2


def test_does_not_build_for_another_rule_of_a_linter(checkout):
    assert run(checkout, "true").returncode == 0
    with (checkout / "pyproject.toml").open("a") as file:
        file.write('\n[tool.another]\nrule = "x"\n')
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"]


def test_mpi4py_is_built_with_the_sites_mpi(checkout):
    assert run(checkout, "true", HVDTRAIN_MPI="site").returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]


def test_works_through_symlinks(checkout):
    links = checkout.parent / "links"
    links.mkdir()
    (links / "one").symlink_to(checkout / "launch" / "run")
    (links / "two").symlink_to("one")
    done = run(checkout, "sh", "-c", "echo $VIRTUAL_ENV", script=links / "two")
    assert done.stdout.strip() == str(checkout / ".venv")


def test_two_at_the_same_time_build_once(checkout):
    both = [
        subprocess.Popen(
            [str(checkout / "launch" / "run"), "sh", "-c", "echo done"],
            env=environment(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [each.communicate(timeout=60) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert [output for output, _ in outputs] == ["done\n", "done\n"]
    assert "waiting for it" in "".join(errors for _, errors in outputs)
    assert calls(checkout) == ["venv", "pip"]


def test_a_broken_set_up_is_tried_again(checkout):
    failed = run(checkout, "echo", "never", UV_FAILS_WITH="boom: no such thing", HOROVOD_GPU_OPERATIONS="NCCL")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "boom: no such thing" in failed.stderr
    assert "the set-up failed" in failed.stderr
    assert run(checkout, "echo", "now").stdout == "now\n"
    # Made with the setting of the first try: asking for it again changes nothing.
    assert run(checkout, "true", HOROVOD_GPU_OPERATIONS="NCCL").stderr == ""


@pytest.mark.parametrize(
    ("uv_says", "message"),
    [
        (
            "error: Failed to fetch: `the index`: dns error: failed to lookup address",
            "package index could not be reached",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_the_reason_of_a_failure_and_its_remedy_are_told(checkout, uv_says, message):
    failed = run(checkout, "true", UV_FAILS_WITH=uv_says)
    assert failed.returncode == 1
    assert message in failed.stderr


def test_a_missing_compiler_is_told_before_anything_is_installed(checkout):
    failed = run(checkout, "true", CXX="no-such-compiler")
    assert failed.returncode == 1
    assert "needs a C++ compiler, not found (CXX=no-such-compiler)" in failed.stderr
    assert "apt install g++ make" in failed.stderr
    assert calls(checkout) == []


def test_too_little_disk_is_told(checkout):
    bootstrap = checkout / "launch" / "bootstrap.py"
    bootstrap.write_text(bootstrap.read_text().replace("NEEDED_DISK_GB = 5", "NEEDED_DISK_GB = 10**9"))
    failed = run(checkout, "true")
    assert failed.returncode == 1
    assert "GB of disk. Free in" in failed.stderr
    assert calls(checkout) == []


def test_no_usable_python_is_told(checkout):
    wrong = run(checkout, "true", HVDTRAIN_PYTHON="/bin/false")
    assert wrong.returncode == 1
    assert "HVDTRAIN_PYTHON must be a Python from 3.10 to 3.13" in wrong.stderr
    shell_only = checkout.parent / "shell"
    shell_only.mkdir()
    for tool in ("sh", "dirname", "readlink"):
        (shell_only / tool).symlink_to(shutil.which(tool))
    none = run(checkout, "true", HVDTRAIN_PYTHON="", PATH=str(shell_only))
    assert none.returncode == 1
    assert "no Python from 3.10 to 3.13 on PATH" in none.stderr


@pytest.mark.parametrize(
    ("command", "code", "message"), [((), 1, "a command is missing"), (("nope",), 127, "not found: nope")]
)
def test_bad_commands(checkout, command, code, message):
    done = run(checkout, *command)
    assert done.returncode == code
    assert message in done.stderr


def test_restarts(checkout):
    """The rest is in test_restarts.py."""
    code = "import os, sys; print(os.environ['HVDTRAIN_RESTART'], sys.argv[1:]); sys.exit(7)"
    command = ("--restarts", "1", "--restart-pause=0", "python", "-c", code, "--restarts", "a b")
    done = run(checkout, *command)
    assert done.returncode == 7
    assert done.stdout == "0 ['--restarts', 'a b']\n1 ['--restarts', 'a b']\n"
    assert "launch/run: the job died with exit code 7; start 2 of at most 2 in 0 s." in done.stderr
    assert calls(checkout) == ["venv", "pip"]


def test_bad_restarts_are_told_before_anything_is_installed(checkout):
    done = run(checkout, "--restarts", "true")
    assert done.returncode == 1
    assert "--restarts must be a whole number, at least 0. Received: true." in done.stderr
    assert "For example: launch/run --restarts 3" in done.stderr
    assert calls(checkout) == []


def test_signals_reach_the_command(checkout):
    assert run(checkout, "true").returncode == 0
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))\n"
        "print('up', flush=True)\n"
        "time.sleep(30)"
    )
    process = subprocess.Popen(
        [str(checkout / "launch" / "run"), "python", "-c", code],
        env=environment(checkout),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 33


def test_sigterm_during_the_set_up_ends_the_installer_too(checkout):
    process = subprocess.Popen(
        [str(checkout / "launch" / "run"), "true"], env=environment(checkout), stderr=subprocess.PIPE, text=True
    )
    while calls(checkout) != ["venv", "pip"]:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2
