"""Jobs on two lab hosts: normal runs, hosts that are not ready, and network failures."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from laboratory import FOLDER, Laboratory, missing
from launcher import LONG, ROOT, Finished, Job, run_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.lab,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

MPIRUN, HOROVODRUN = str(ROOT / "launch" / "mpirun.sh"), str(ROOT / "launch" / "horovodrun.sh")
TRAIN = [sys.executable, "-m", "hvdtrain", "--deterministic", "--run-dir"]
SMOOTH = ["--task", f"{Path(__file__).with_name('smooth_task.py')}:TASK"]
LAUNCHERS = {"mpirun": [MPIRUN], "horovodrun": [HOROVODRUN], "gloo": [HOROVODRUN, "--gloo"]}


@pytest.fixture
def lab():
    with Laboratory(2) as lab:
        yield lab


def start(lab: Laboratory, command: list[str], *, ranks_per_host: int = 1, launcher: str = "mpirun", **env: str) -> Job:
    line = [*LAUNCHERS[launcher], "-H", lab.slots(ranks_per_host), *command]
    variables = [f"{name}={value}" for name, value in env.items()]
    return Job(lab.command("lab1", ["env", *variables, *line]), ranks=2 * ranks_per_host, launcher="")


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    import tensorflow as tf

    (latest,) = sorted((run_dir / "checkpoints").glob("step-????????"))[-1:]
    reader = tf.train.load_checkpoint(str(latest / "state"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith("model/")]
    assert len(names) >= 4
    return {name: reader.get_tensor(name) for name in names}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[str, np.ndarray]:
    """The weights after 40 steps of one process with four times the batch."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    job = run_job([*TRAIN, str(run_dir), *SMOOTH, "--steps", "40", "--batch-size", "128"], ranks=1, timeout_s=90)
    assert job.code == 0, job.output
    return weights(run_dir)


@pytest.mark.parametrize("launcher", ["mpirun", LONG("horovodrun"), LONG("gloo")])
def test_two_hosts_equal_one_process(launcher, lab, one_process):
    """The run directory is only on the first host, and no secrets appear on command lines."""
    run_dir = f"/mnt/{launcher}"
    command = [*TRAIN, run_dir, *SMOOTH, "--steps", "40", "--batch-size", "32"]
    job = start(lab, command, ranks_per_host=2, launcher=launcher, MY_PASSWORD="hunter2")
    lines = set()
    while job.is_running:
        # Processes on both hosts, including ssh clients.
        lines |= command_lines()
        time.sleep(0.2)
    done = job.end(10)
    assert done.code == 0, done.output
    assert "4 rank(s) on lab1:2, lab2:2 over 10.77.0.0/24" in done.output, done.output
    assert "ranks: 4 on 2 host(s)" in done.output, done.output
    assert not any(b"hunter2" in line for line in lines if b"env\0MY_PASSWORD" not in line)
    assert not any(b"HOROVOD_RENDEZVOUS_TOKEN=" in line for line in lines)
    found = weights(lab.path("lab1", run_dir))
    assert found.keys() == one_process.keys()
    for name, value in found.items():
        assert np.allclose(value, one_process[name], atol=1e-5), name
    assert not lab.path("lab2", run_dir).exists()


def command_lines() -> set[bytes]:
    """The command lines of all processes; some may end meanwhile."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.add(path.read_bytes())
    return found


def test_run_resumes_from_checkpoints_of_the_first_host(lab):
    uninterrupted, resumed = "/mnt/uninterrupted", "/mnt/resumed"
    for run_dir, steps in ((uninterrupted, 40), (resumed, 20), (resumed, 40)):
        done = start(lab, [*TRAIN, run_dir, "--steps", str(steps)]).end(90)
        assert done.code == 0, done.output
    one, other = (json.loads(lab.path("lab1", f"{each}/summary.json").read_text()) for each in (uninterrupted, resumed))
    assert other["resumed_from"] == 20
    assert other["weights_sha256"] == one["weights_sha256"]


@pytest.mark.long
def test_averaging_across_hosts_reduces_network_traffic(lab):
    """Gradients are averaged within each host at every step, parameters between hosts at every 48th."""
    sent = {}
    for mode, more in (
        ("sync", []),
        ("host", ["--mode", "local", "--average-across", "host", "--sync-every", "48"]),
    ):
        before = lab.bytes_sent("lab1")
        options = ["--steps", "240", "--eval-every", "0", "--check-every", "0", *more]
        done = start(lab, [*TRAIN, f"/mnt/{mode}", *options], ranks_per_host=2).end(150)
        assert done.code == 0, done.output
        sent[mode] = lab.bytes_sent("lab1") - before
        summary = json.loads(lab.path("lab1", f"/mnt/{mode}/summary.json").read_text())
        assert (summary["ranks"], summary["hosts"]) == (4, 2)
        assert summary["eval"]["accuracy"] > 0.9
    # Starting, comparing replicas and evaluating send the same in both.
    assert sent["host"] < 0.4 * sent["sync"], sent


REDUCE = """
import sys
import numpy
from mpi4py import MPI
values = numpy.ones(int(sys.argv[1]) // 4, numpy.float32)
total = numpy.empty_like(values)
MPI.COMM_WORLD.Allreduce(values, total)
assert (total == MPI.COMM_WORLD.size).all() and MPI.COMM_WORLD.size == 3
"""


def test_three_hosts_send_the_minimum_of_a_ring():
    """Open MPI's default sends twice as much if the number of ranks is not a power of two."""
    size = 8 << 20
    with Laboratory(3) as lab:
        before = [lab.bytes_sent(name) for name in lab.names]
        line = [MPIRUN, "-H", lab.slots(), sys.executable, "-c", REDUCE, str(size)]
        done = Job(lab.command("lab1", line), ranks=3, launcher="").end(60)
        assert done.code == 0, done.output
        sent = [lab.bytes_sent(name) - start for name, start in zip(lab.names, before, strict=True)]
    needed = 2 * 2 / 3 * size
    assert needed < max(sent) < 1.1 * needed, [each / needed for each in sent]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_hostfile_network_and_variables(launcher, lab, tmp_path, monkeypatch):
    (tmp_path / "hosts.txt").write_text("lab1 slots=2\nlab2 slots=1  # the small one\n")
    monkeypatch.setenv("GREETING", "'hello' \"$HOME\"")
    options = ["--hostfile", str(tmp_path / "hosts.txt"), "--network", "eth0", "--env", "GREETING"]
    # All users of a host can read command lines.
    show = 'echo "$GREETING from $(hostname), shown $(cat /proc/[0-9]*/cmdline | grep -ac "\'[h]ello")"'
    line = [*LAUNCHERS[launcher], *options, "sh", "-c", show]
    done = Job(lab.command("lab1", line), ranks=3, launcher="").end(20)
    assert done.code == 0, done.output
    by = {"mpirun": "Open MPI", "horovodrun": "horovodrun with MPI", "gloo": "horovodrun with Gloo"}[launcher]
    assert f"3 rank(s) on lab1:2, lab2:1 over eth0 by {by}" in done.output
    assert sorted(re.findall(r"'hello' \"\$HOME\" from (\w+), shown 0", done.output)) == ["lab1", "lab1", "lab2"]


def test_doctor_compares_hosts(lab):
    done = start(lab, ["python", "-m", "hvdtrain", "doctor"]).end(60)
    assert done.code == 0, done.output
    assert re.search(r"host +lab1 +lab2", done.output), done.output
    assert re.search(r"hvdtrain's code +(\w{12}) +\1", done.output), done.output
    assert re.search(r"16 MiB +[\d.]+ ms +\d+ Mbit/s", done.output), done.output
    assert re.search(r"one connection from lab1 to lab2: \d+ Mbit/s", done.output), done.output
    assert re.search(r"slowest rank: [01] on lab[12], [\d.]+ times the median time", done.output), done.output
    assert re.search(r"MPI polls: each rank keeps [\d.]+ cores busy .* horovodrun --gloo", done.output), done.output


@pytest.mark.long
def test_failed_job_is_restarted(lab):
    options = ["--steps", "300", "--checkpoint-every", "20", "--run-dir", "/mnt/again"]
    supervised = [str(ROOT / "launch" / "run"), "--restarts", "2", MPIRUN, "-H", lab.slots(), *TRAIN[:-1], *options]
    job = Job(lab.command("lab1", supervised), ranks=2, launcher="")
    while not list(lab.path("lab1", "/mnt/again/checkpoints").glob("step-????????")):
        assert job.is_running, job.end(1).output
        time.sleep(0.1)
    os.kill(next(pid for pid, env in job.processes().items() if env.get("OMPI_COMM_WORLD_RANK") == "1"), signal.SIGKILL)
    done = job.end(90)
    assert done.code == 0, done.output
    assert "lost connection to rank 1 (host lab2)" in done.output
    assert json.loads(lab.path("lab1", "/mnt/again/summary.json").read_text())["resumed_from"] >= 20


def failed_start(lab: Laboratory, launcher: str = "mpirun", *options: str) -> Finished:
    """Runs a launcher that must fail before it starts a job, within the timeout for hosts."""
    began_s = time.monotonic()
    line = [*LAUNCHERS[launcher], "--start-timeout", "4", *options, "-H", lab.slots(), "hostname"]
    done = Job(lab.command("lab1", line), ranks=2, launcher="").end(30)
    assert time.monotonic() - began_s < 15, done.output
    assert done.code == 1, done.output
    assert "Traceback" not in done.output, done.output
    return done


def test_unreachable_host_is_reported(lab):
    assert start(lab, ["hostname"]).end(20).code == 0
    # Its packets are dropped.
    lab.cut("lab2")
    for launcher in LAUNCHERS:
        assert (
            "host lab2 must accept ssh without a prompt. Received: ssh: connect to host lab2"
            in failed_start(lab, launcher).output
        )
    lab.restore("lab2")
    # Another host responds in its name.
    known = FOLDER / "lab1" / "ssh" / "known_hosts"
    text = known.read_text()
    known.write_text(re.sub(r"(lab1\S* \S+ )(\S+)( .*\nlab2\S* \S+ )\S+", r"\1\2\3\2", text))
    assert "host lab2 must accept ssh without a prompt. Received: WARNING: REMOTE HOST" in failed_start(lab).output
    known.write_text(text)
    # It does not accept our key.
    authorized = FOLDER / "lab2" / "ssh" / "authorized_keys"
    text = authorized.read_text()
    authorized.write_text("")
    assert (
        "host lab2 must accept ssh without a prompt. Received: root@lab2: Permission denied" in failed_start(lab).output
    )
    authorized.write_text(text)
    # It has no environment: an empty disk is mounted over it.
    venv = sys.prefix
    subprocess.run(lab.command("lab2", ["mount", "-t", "tmpfs", "tmpfs", venv]), check=True)
    assert f"host lab2 must have the same environment at the same path. Received: no {venv}" in failed_start(lab).output
    subprocess.run(lab.command("lab2", ["umount", venv]), check=True)
    assert start(lab, ["hostname"]).end(20).code == 0
    # Its ssh server is not running.
    lab.kill("lab2")
    assert "Connection refused" in failed_start(lab).output


def test_port_in_use(lab):
    """If a site restricts the port range and no port in it is free, the job ends at once."""
    listen = "import socket, time; taken = socket.create_server(('', 41000)); print(flush=True); time.sleep(100)"
    other = subprocess.Popen(lab.command("lab1", [sys.executable, "-c", listen]), stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        one_port = {"OMPI_MCA_btl_tcp_port_min_v4": "41000", "OMPI_MCA_btl_tcp_port_range_v4": "1"}
        done = start(lab, [*TRAIN, "/mnt/port", "--steps", "3"], **one_port).end(30)
    finally:
        other.kill()
        other.wait()
    assert done.code not in (0, 64, 65, 70, 75, 78), done.output
    assert "bind() failed: no port available in the range [41000" in done.output, done.output


def test_different_version_on_a_host_is_reported(lab, tmp_path):
    """The other host has its own copy of the package, with one line changed."""
    copy = tmp_path / "hvdtrain"
    subprocess.run(["cp", "-r", str(ROOT / "hvdtrain"), str(copy)], check=True)
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + "# changed\n")
    subprocess.run(lab.command("lab2", ["mount", "--bind", str(copy), str(ROOT / "hvdtrain")]), check=True)
    try:
        done = start(lab, [*TRAIN, "/mnt/version", "--steps", "5"]).end(60)
    finally:
        subprocess.run(lab.command("lab2", ["umount", str(ROOT / "hvdtrain")]), check=True)
    assert done.code == 78, done.output
    difference = r"hvdtrain's code: '\w{12}' on rank 0 \(host lab1\), '\w{12}' on rank 1 \(host lab2\)"
    assert re.search(difference, done.output), done.output


@pytest.mark.timed
@pytest.mark.parametrize("launcher", ["mpirun", LONG("gloo")])
def test_network_cut(launcher, lab):
    """Both sides stop; only one has written checkpoints, which can be resumed."""
    run_dir = f"/mnt/cut-{launcher}"
    stall_s = 20  # the first step takes seconds on a busy machine
    options = ["--steps", "100000", "--checkpoint-every", "20", "--stall-timeout", str(stall_s)]
    job = start(lab, [*TRAIN, run_dir, *options], launcher=launcher)
    checkpoints = lab.path("lab1", f"{run_dir}/checkpoints")
    while not list(checkpoints.glob("step-????????")):
        assert job.is_running, job.end(1).output
        time.sleep(0.1)
    lab.cut("lab2")
    cut_s = time.monotonic()
    try:
        while ranks_left(job):
            assert time.monotonic() - cut_s < stall_s + 9, job.end(1).output
            time.sleep(0.2)
        done = job.end(60)
    finally:
        lab.restore("lab2")
        job.kill()
    assert done.code != 0
    assert re.search(r"hvdtrain: no heartbeat from rank 1 \(host lab2\) for \d+ s", done.output), done.output
    assert not lab.path("lab2", run_dir).exists()
    (latest,) = sorted(checkpoints.glob("step-????????"))[-1:]
    subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=latest, check=True)


def ranks_left(job: Job) -> list[int]:
    """The processes of ranks on both hosts."""
    variables = {"OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"}
    return [pid for pid, environment in job.processes().items() if variables & environment.keys()]


@pytest.mark.long
def test_network_with_packet_loss():
    """5 % of the packets are lost: the job is slower, but its weights are the same."""
    summaries = []
    for kind in ({}, {"loss": 0.05, "delay_ms": 200.0}):
        with Laboratory(2, **kind) as lab:
            run_dir = "/mnt/run"
            options = ["--steps", "6", "--batch-size", "256", "--check-every", "0"]
            done = start(lab, [*TRAIN, run_dir, *options]).end(280)
            assert done.code == 0, done.output
            summaries.append(json.loads(lab.path("lab1", f"{run_dir}/summary.json").read_text()))
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[1]["wall_seconds"] > summaries[0]["wall_seconds"]


@pytest.mark.long
def test_wait_free_does_not_wait_for_a_stopped_host(lab, tmp_path):
    """The other host continues meanwhile, and the steps of both are averaged."""
    spec = {"fault": "SIGSTOP", "ranks": [1], "step": 20, "mark": str(tmp_path / "moment"), "made": str(tmp_path)}
    options = ["--steps", "200", "--mode", "local", "--sync-every", "5", "--wait-free"]
    train = [sys.executable, str(ROOT / "tests" / "parallel" / "faulty.py"), json.dumps({**spec, "step_s": 0.01})]
    job = start(lab, [*train, "--run-dir", "/mnt/still", *options])
    while not (tmp_path / "moment").exists():
        assert job.is_running, job.end(1).output
        time.sleep(0.1)
    time.sleep(4)
    os.kill(next(pid for pid, env in job.processes().items() if env.get("OMPI_COMM_WORLD_RANK") == "1"), signal.SIGCONT)
    done = job.end(60)
    assert done.code == 0, done.output
    assert "weights: equal on all ranks" in done.output
    made = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert made[0] > made[1] + 50, made
    assert sum(made) >= 400
    summary = json.loads(lab.path("lab1", "/mnt/still/summary.json").read_text())
    assert 0 < 32 * sum(made) - summary["samples"] < 32 * 200, "the last batch of an epoch is smaller"
    assert summary["eval"]["accuracy"] > 0.9


def started(lab: Laboratory, host: str, where: str) -> Job:
    """Starts a long job with rank 0 on a host, and returns when it is training."""
    run_dir = f"/mnt/stopped-{host}"
    job = Job(lab.command("lab1", [MPIRUN, "-H", where, *TRAIN, run_dir, "--steps", "100000"]), ranks=2, launcher="")
    while not lab.path(host, f"{run_dir}/metrics.jsonl").exists():
        assert job.is_running, job.end(1).output
        time.sleep(0.1)
    return job


def test_exit_codes_and_signals_are_passed_on(lab):
    done = start(lab, [*TRAIN, "/mnt/wrong", "--steps", "-1"]).end(60)
    assert done.code == 64, done.output
    # With rank 0, or with no rank, on the launcher's host.
    for host, where, name in (("lab1", "lab1:1,lab2:1", "SIGTERM"), ("lab2", "lab2:2", "SIGUSR1")):
        job = started(lab, host, where)
        job.signal(signal.SIGTERM)
        done = job.end(30)
        assert done.code == 75, done.output
        assert re.search(rf"stopped at step \d+ of 100000 \({name} on rank", done.output), done.output
        assert len(list(lab.path(host, f"/mnt/stopped-{host}/checkpoints").glob("step-????????"))) == 1
