"""launch/mpirun.sh and launch/horovodrun.sh: hosts, arguments for each MPI, and error messages."""

import dataclasses
import ipaddress
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "launch"))

import horovodrun  # noqa: E402
import mpi_implementation  # noqa: E402
import mpirun  # noqa: E402
from arguments import Job  # noqa: E402

from hvdtrain.system.hosts import Host, find_problems, read_hosts, remote_names, slurm_hosts, spread  # noqa: E402
from hvdtrain.system.network import interface_in, network_to  # noqa: E402
from hvdtrain.system.remote_process import forwarded  # noqa: E402

FOUR = [Host("far1", 4), Host("far2", 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:4,b:2", [("a", 4), ("b", 2)]),
        ("a, b.site.org:3", [("a", 1), ("b.site.org", 3)]),
        ("a slots=4 max_slots=8\n# no ranks here\n\nb:2  # old\nc\n", [("a", 4), ("b", 2), ("c", 1)]),
        ("", []),
    ],
)
def test_read_hosts(text, expected):
    assert [tuple(host) for host in read_hosts(text)] == expected


@pytest.mark.parametrize("text", ["a:4:2", "a:x", "a slots=0", "a:1,a:1", "a b", "a;b"])
def test_invalid_hosts_are_rejected(text):
    with pytest.raises(ValueError, match="hosts must have the form a:4,b:4"):
        read_hosts(text)


def test_ranks_fill_hosts_in_order():
    assert spread(FOUR, 8) == FOUR
    assert spread(FOUR, 5) == [Host("far1", 4), Host("far2", 1)]
    assert spread(FOUR, 3) == [Host("far1", 3)]
    with pytest.raises(ValueError, match="Received: 9 ranks on far1:4, far2:4"):
        spread(FOUR, 9)


@pytest.mark.parametrize(("tasks", "expected"), [("4(x2),3", [4, 4, 3]), ("2,1,5", [2, 1, 5]), ("7(x3)", [7, 7, 7])])
def test_hosts_of_a_slurm_allocation(tasks, expected, tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    env = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": tasks}
    assert slurm_hosts(env) == [Host(f"n{i + 1}", slots) for i, slots in enumerate(expected)]
    with pytest.raises(ValueError, match="scontrol must list"):
        slurm_hosts({**env, "SLURM_JOB_NODELIST": "other"})


def test_in_slurm_open_mpi_gets_hosts_from_the_scheduler():
    arguments, _ = open_mpi(Job(["true"], FOUR, 8, "ib0", [], "Slurm"))
    assert "-H" not in arguments.split()
    assert "--prefix /env" in arguments


def test_remote_names_exclude_this_host():
    own = socket.gethostname()
    assert remote_names([Host("localhost", 1), Host("127.0.0.1", 1), Host(own, 1), Host("far1", 4)]) == ["far1"]


def test_only_needed_variables_are_forwarded():
    secrets = ("AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "PS1", "PATHFINDER_KEY", "TERMINAL_PASSWORD")
    env = dict.fromkeys(("PATH", "HVDTRAIN_MPI", "NCCL_DEBUG", *secrets), "x")
    assert list(forwarded(env)) == ["PATH", "HVDTRAIN_MPI", "NCCL_DEBUG"]
    assert list(forwarded(env, ["MY_TOKEN"])) == ["PATH", "HVDTRAIN_MPI", "NCCL_DEBUG", "MY_TOKEN"]


def job(where: list[Host], ranks: int, network: str | None = None) -> Job:
    return Job(["python", "train.py"], where, ranks, network, [])


def open_mpi(made: Job, major: int = 4, *, as_root: bool = False) -> tuple[str, list[str]]:
    arguments, notes = mpirun.open_mpi(made, {"PATH": "/x", "SECRET": "y"}, Path("/env"), major, as_root=as_root)
    return " ".join(arguments), notes


def test_open_mpi_on_one_host(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert open_mpi(job([], 4)) == ("-np 4 --tag-output --map-by slot --bind-to none", [])
    arguments, notes = open_mpi(job([], 5), as_root=True)
    assert arguments == "-np 5 --tag-output --allow-run-as-root --oversubscribe --map-by slot --bind-to none"
    assert notes == ["as root (--allow-run-as-root)", "more ranks than cores on this host: ranks share cores"]
    assert open_mpi(job([], 5), major=5)[0] == "-np 5 --tag-output --map-by slot:OVERSUBSCRIBE --bind-to none"


@pytest.mark.parametrize(
    "launcher",
    [ROOT / "launch" / "mpirun.py", Path(sys.executable).with_name("horovodrun")],
    ids=lambda path: path.name,
)
def test_lines_are_tagged_by_rank_unless_a_progress_bar_can_be_drawn(launcher):
    """Open MPI gives each rank a pseudo-terminal, whatever its own output is."""
    command = [sys.executable, str(launcher), "-np", "2", "sh", "-c", "test -t 1 && echo said"]
    screen, programs = pty.openpty()
    with os.fdopen(programs, "w") as terminal:
        subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, timeout=60, check=True)
    shown = os.read(screen, 1000).decode()
    os.close(screen)
    assert shown.split() == ["said", "said"]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(piped.stdout.split()) == ["[1,0]<stdout>:said", "[1,1]<stdout>:said"]


def test_open_mpi_on_several_hosts():
    arguments, notes = open_mpi(job(FOUR, 8, "10.1.0.0/16"))
    assert arguments == (
        "-np 8 --tag-output -H far1:4,far2:4 --map-by slot --bind-to none --prefix /env -x PATH "
        "--mca btl_tcp_if_include 10.1.0.0/16 --mca oob_tcp_if_include 10.1.0.0/16"
    )
    assert notes == []
    assert "--prtemca oob_tcp_if_include ib0" in open_mpi(job(FOUR, 8, "ib0"), major=5)[0]


def test_mpich_and_intel_mpi():
    arguments, _ = mpirun.hydra(job(FOUR, 8, "ib0"), {"PATH": "/x", "SECRET": "y"}, is_intel=False)
    assert " ".join(arguments) == "-n 8 -prepend-rank -hosts far1:4,far2:4 -genvlist PATH -iface ib0"
    arguments, _ = mpirun.hydra(job(FOUR, 8), {"PATH": "/x"}, is_intel=True)
    assert " ".join(arguments) == "-n 8 -prepend-rank -hosts far1,far2 -ppn 4 -genvlist PATH"
    arguments, _ = mpirun.hydra(job([], 2), {}, is_intel=False, tags_output=False)
    assert arguments == ["-n", "2"]
    with pytest.raises(SystemExit, match="64"):
        mpirun.hydra(job(spread(FOUR, 5), 5), {}, is_intel=True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/", ("Open MPI", 4)),
        ("mpirun (Open MPI) 5.0.3", ("Open MPI", 5)),
        ("prterun (PRRTE) 3.0.6", ("Open MPI", 5)),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", ("MPICH", 4)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", ("Intel MPI", 2021)),
    ],
)
def test_mpi_implementation_is_detected(said, expected):
    assert mpi_implementation.parse(said) == expected


def test_unknown_mpi_is_rejected():
    with pytest.raises(ValueError, match="Received: poe 1"):
        mpi_implementation.parse("poe 1.3")


def test_horovodrun():
    made = job(FOUR, 8, "ib0")
    options = {"start_timeout_s": 30.0, "verbose": False}
    start = ["-np", "8", "--start-timeout", "30", "-H", "far1:4,far2:4", "--network-interface", "ib0"]
    assert horovodrun.arguments_for(made, Path("/env"), gloo=True, **options) == [*start, "--gloo"]
    mpi = ["--mpi", "--mpi-args=--prefix /env"]
    assert horovodrun.arguments_for(made, Path("/env"), gloo=False, **options) == [*start, *mpi]
    # MPICH and Intel MPI end at an option that they do not know.
    assert horovodrun.arguments_for(made, None, gloo=False, **options) == [*start, "--mpi"]
    assert horovodrun.environment({"PATH": "/x", "SECRET": "y"}, job([], 2)) == {"PATH": "/x"}
    named = dataclasses.replace(job([], 2), env_names=["SECRET", "PATH"])
    assert horovodrun.environment({"PATH": "/x", "SECRET": "y"}, named)["HVDTRAIN_FORWARDED"] == "SECRET PATH"
    env = {"ONE_LINE": "-----", "KEY": "-----\nMII", "A-B": "x"}
    for where, refused in (FOUR, ["KEY", "A-B"]), ([], []):
        named = dataclasses.replace(job(where, 2), env_names=list(env))
        assert horovodrun.unsendable(named, env) == refused
    ours = horovodrun.environment({"PATH": "/x", "SECRET": "y"}, made)
    assert ours.items() >= {"PATH": "/x", "OMPI_MCA_btl_tcp_flags": "send"}.items()
    assert Path(ours["OMPI_MCA_coll_tuned_dynamic_rules_filename"]).is_file()
    assert "SECRET" not in ours
    # Existing values take precedence, and then no rules are set.
    own = {"OMPI_MCA_btl_tcp_flags": "put", "OMPI_MCA_coll_tuned_allreduce_algorithm": "3"}
    own["OMPI_MCA_btl_tcp_eager_limit"] = "65536"
    assert horovodrun.environment(own, made) == own


@pytest.mark.parametrize(
    ("said", "is_open_mpi"),
    [("mpirun (Open MPI) 4.1.8", True), ("HYDRA build details:\n    Version:    5.0.2", False), ("poe 1.3", False)],
)
def test_horovodrun_tells_other_hosts_only_where_open_mpi_is(said, is_open_mpi, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert horovodrun._open_mpi() == (tmp_path if is_open_mpi else None)


def test_network_detection():
    assert network_to("127.0.0.1") == "127.0.0.0/8"
    assert network_to("no-such-host.invalid") is None
    assert interface_in(ipaddress.ip_network("127.0.0.0/8")) == "lo"
    assert interface_in(ipaddress.ip_network("203.0.113.0/24")) is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", None),
        (
            "echo absent",
            "host far must have the same environment at the same path. Received: no /env/bin/python there",
        ),
        ("echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255", "Connection refused"),
        ("echo 'Host key is bad' >&2; echo 'Permission denied (publickey)' >&2; echo bye >&2; exit 255", "Permission"),
        ("sleep 9", "host far did not answer within 0.1 s"),
    ],
)
def test_host_that_is_not_ready_is_reported(script, expected, tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    problems = find_problems(["far"], Path("/env/bin/python"), 0.1)
    assert (not problems) if expected is None else expected in problems[0]


def start(launcher: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a launcher as its .sh does, in this environment; with PYTHONUNBUFFERED, as in many containers."""
    command = [sys.executable, str(ROOT / "launch" / f"{launcher}.py"), *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command is missing. For example: launch/"),
        (["-np", "0", "true"], "-np must be at least 1. Received: 0"),
        (["-np", "3", "-H", "a:1,b:1", "true"], "Increase the slots of a host: a:2"),
        (["--hostfile", "/no/such/file", "true"], "No such file"),
        (["--hostfile", "/dev/null", "true"], "the hostfile must name at least one host"),
        (["--env", "NOT_SET_ANYWHERE", "true"], "--env must name variables that are set. Received: NOT_SET_ANYWHERE"),
    ],
)
def test_invalid_usage_is_rejected(launcher, arguments, message):
    done = start(launcher, *arguments)
    assert done.returncode == 64
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_on_this_host():
    show = "import os; print(*map(os.environ.get, ('OMPI_COMM_WORLD_RANK', 'PYTHONUNBUFFERED')))"
    done = start("mpirun", "-np", "3", sys.executable, "-c", show)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[1,{rank}]<stdout>:{rank} None" for rank in range(3)]
    assert "launch/mpirun.sh: 3 rank(s) on this host by Open MPI 4" in done.stderr
    assert start("mpirun", "-np", "1", "sh", "-c", "exit 7").returncode == 7


def test_horovodrun_does_not_import_tensorflow_or_take_options_of_the_command(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported')\n")
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    # An option of the command that could be an abbreviation of two of horovodrun's.
    command = ["echo", "started", "--timeline", "file"]
    line = [str(Path(sys.executable).with_name("horovodrun")), "-np", "1", *command]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "started --timeline file" in done.stdout


def test_horovodrun_with_gloo_shows_no_secrets():
    """Command lines can be read by all users of a host."""
    rank = """
import os, pathlib
assert os.environ["MY_TOKEN"] == "sesame" * 3
lines = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_text(errors="replace"))
    except OSError:
        pass
print("own command lines:", sum("HOROVOD_RANK=" in line for line in lines))
secrets = ("sesame" * 3, os.environ["HOROVOD_RENDEZVOUS_TOKEN"])
print("shown:", sum(secret in line for line in lines for secret in secrets))
"""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "1", sys.executable, "-c", rank],
        env={**os.environ, "MY_TOKEN": "sesame" * 3},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"own command lines: [1-9]", done.stdout), done.stdout
    assert "shown: 0" in done.stdout, done.stdout
