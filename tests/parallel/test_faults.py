"""Faults in real jobs: the job ends in time, reports the cause, and resumes exactly.

The common oracle: the final weights are bit-identical to those of an uninterrupted run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import LONG, Finished, Job, listening, run_commands, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timed]

STEPS, EVERY = 120, 20
TRAIN = [sys.executable, "-m", "hvdtrain"]
FAULTY = [sys.executable, str(Path(__file__).with_name("faulty.py"))]
OPTIONS = ["--deterministic", "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--warmup-steps", "70"]
ENDS_WITHIN_S = 5.0
# Longer than a start takes on a busy machine.
STALL_S = 8


def flags(run_dir: Path, *more: str) -> list[str]:
    return [*OPTIONS, "--run-dir", str(run_dir), *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict:
    """The summary of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    job = run_job([*TRAIN, *flags(run_dir)], ranks=2, timeout_s=90)
    assert job.code == 0, job.output
    return json.loads((run_dir / "summary.json").read_text())


def start(
    run_dir: Path, fault: str, *, ranks=(1,), step=47, launcher="mpirun", options=OPTIONS, more=(), **spec
) -> tuple[Job, Path]:
    mark = run_dir.parent / "time of fault"
    spec = {"fault": fault, "ranks": list(ranks), "step": step, "mark": str(mark), **spec}
    command = [*FAULTY, json.dumps(spec), *options, "--run-dir", str(run_dir), *more]
    return Job(command, ranks=2, launcher=launcher), mark


def wait_for_fault(job: Job, mark: Path) -> set[int]:
    """Waits for the fault; returns the ports on which the job listened before."""
    ports: set[int] = set()
    while not mark.exists():
        ports = ports or job.ports()
        time.sleep(0.3 if not ports else 0.01)
        assert job.is_running, job.end(1).output
    return ports


def ended_in_time(job: Job, mark: Path, within_s: float = ENDS_WITHIN_S, ports: set[int] | None = None) -> Finished:
    """Returns the ended job, whose processes and ports must be gone within five seconds of the marked time."""
    ports = ports or wait_for_fault(job, mark)
    done = job.end(90)
    took_s = time.time() - float(mark.read_text())
    assert took_s < within_s, f"{took_s:.1f} s\n{done.output}"
    while time.time() < float(mark.read_text()) + within_s and job.processes():
        time.sleep(0.1)
    assert not job.processes()
    assert ports, "the job has not listened on any port: its ports cannot be checked"
    assert not ports & set(listening())
    return done


def resumes(run_dir: Path, uninterrupted: dict, *, resumed_from: int | None, more=()) -> Finished:
    """Restarts the run, which must end as the uninterrupted one."""
    job = run_job([*TRAIN, *flags(run_dir, *more)], ranks=2, timeout_s=90)
    assert job.code == 0, job.output
    equals(run_dir, uninterrupted, resumed_from)
    return job


def equals(run_dir: Path, uninterrupted: dict, resumed_from: int | None) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["resumed_from"] == resumed_from
    for name in ("weights_sha256", "loss", "metrics", "eval", "steps", "samples"):
        assert summary[name] == uninterrupted[name], name
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [each["step"] for each in logged if each["event"] == "train"]
    assert steps == sorted(set(steps)), "a repeated step must be logged once"


def steps_of_checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-????????"))


def tracebacks(done: Finished, launcher: str) -> int:
    """Counts the tracebacks of ranks. A launcher in Python prints its own, and tags those of ranks."""
    tag = "" if launcher == "mpirun" else r"\[.*\]<stderr>:"
    return len(re.findall(rf"^{tag}Traceback", done.output, re.MULTILINE))


@pytest.mark.parametrize(
    ("rank", "launcher"),
    [LONG(1, "mpirun"), LONG(0, "mpirun"), LONG(1, "horovodrun"), (1, "horovodrun --gloo")],
)
def test_a_killed_rank(rank, launcher, uninterrupted, tmp_path):
    """Rank 0, which writes the checkpoints, or another: the job ends and resumes from the last checkpoint."""
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGKILL", ranks=[rank], launcher=launcher)
    done = ended_in_time(job, mark)
    assert done.code not in (0, 64, 65, 70, 75, 78), done.output
    line = done.only_message
    assert re.search(rf"lost connection to rank {rank} \(host .*\) at step 4\d", line), line
    assert not tracebacks(done, launcher), done.output
    assert steps_of_checkpoints(run_dir) == [20, 40]
    if launcher == "mpirun":
        resumes(run_dir, uninterrupted, resumed_from=40)


def test_a_rank_killed_during_a_save(uninterrupted, tmp_path):
    """The incomplete checkpoint is not used. tests/single/test_interrupted_save.py tests all points of a save."""
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "kill in a save", step=60)
    ended_in_time(job, mark)
    assert steps_of_checkpoints(run_dir) == [20, 40]
    resumes(run_dir, uninterrupted, resumed_from=40)
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("to", "launcher", "number"),
    [
        ("rank 1", "mpirun", "SIGTERM"),
        LONG("rank 0", "mpirun", "SIGINT"),
        LONG("rank 1", "horovodrun --gloo", "SIGTERM"),
        LONG("all ranks", "mpirun", "SIGTERM"),
        ("the launcher", "mpirun", "SIGTERM"),
        LONG("the launcher", "mpirun", "SIGINT"),
        LONG("the launcher", "mpirun", "SIGUSR1"),
        LONG("the launcher", "horovodrun", "SIGTERM"),
        LONG("the launcher", "horovodrun --gloo", "SIGTERM"),
    ],
)
def test_stop_signals(to, launcher, number, uninterrupted, tmp_path):
    """A stop signal: all ranks stop at one step and save it; no step is lost."""
    run_dir = tmp_path / "run"
    ranks = {"rank 0": [0], "rank 1": [1], "all ranks": [0, 1], "the launcher": [0]}[to]
    fault = number if to != "the launcher" else "SIGCONT"
    job, mark = start(run_dir, fault, ranks=ranks, launcher=launcher, step_s=0.02, more=["--checkpoint-every", "0"])
    ports = wait_for_fault(job, mark)
    if to == "the launcher":
        job.signal(getattr(signal, number))
    # horovodrun checks after five seconds whether the ranks that it has signalled have ended.
    done = ended_in_time(job, mark, within_s=ENDS_WITHIN_S + (5 if to == "the launcher" else 0), ports=ports)
    assert done.code != 0
    if to != "the launcher" and launcher != "horovodrun --gloo":
        assert done.code == 75, done.output
    (step,) = steps_of_checkpoints(run_dir)
    assert 47 <= step < 100
    line = done.only_message
    # mpirun sends SIGTERM for SIGINT; horovodrun ends before it can forward anything.
    reason = {("mpirun", "SIGINT"): "SIGTERM on", ("horovodrun", "SIGTERM"): "horovodrun ended, detected by"}
    expected = reason.get((launcher, number), f"{number} on") if to == "the launcher" else f"{number} on"
    assert f"stopped at step {step} of {STEPS} ({expected} rank " in line, line
    assert not tracebacks(done, launcher), done.output
    if launcher == "mpirun" and number != "SIGUSR1":
        resumes(run_dir, uninterrupted, resumed_from=step)


@pytest.mark.long
def test_a_second_signal_ends_the_job_at_once(uninterrupted, tmp_path):
    """It arrives during the save that the first signal caused; the previous checkpoint stays intact."""
    run_dir = tmp_path / "run"
    run_job([*TRAIN, *flags(run_dir, "--steps", "20")], ranks=2, timeout_s=90)
    job, mark = start(run_dir, "SIGTERM", sync_s=20, more=["--checkpoint-every", "0"])
    ports = wait_for_fault(job, mark)
    time.sleep(1.5)
    mark.write_text(str(time.time()))
    os.kill(job.rank(1), signal.SIGTERM)
    done = ended_in_time(job, mark, ports=ports)
    assert done.code == 75, done.output
    assert steps_of_checkpoints(run_dir) == [20]
    resumes(run_dir, uninterrupted, resumed_from=20)


STANDS_STILL = """
import os, signal, sys
from hvdtrain.commands import cli
from hvdtrain.fault_tolerance import start_watch
from hvdtrain.system import environment
start_watch.MIN_TIMEOUT_S = 6
if environment.launcher().rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("launcher", ["mpirun", LONG("horovodrun --gloo")])
def test_a_rank_that_hangs_before_it_starts(launcher, tmp_path):
    arguments = ["--run-dir", str(tmp_path / "run"), "--stall-timeout", "3"]
    done = run_job([sys.executable, "-c", STANDS_STILL, *arguments], ranks=3, launcher=launcher, timeout_s=60)
    assert done.code == 1, done.output
    found = re.findall(r"rank (\d) \(host .*\): has waited 6 s for all ranks to start", done.output)
    assert sorted(found) == ["0", "2"], done.output


def test_a_stop_signal_while_a_rank_waits_for_input(uninterrupted, tmp_path):
    """The other ranks wait in that step; the job completes and saves it when the input arrives."""
    run_dir = tmp_path / "run"
    input_s = 3
    job, mark = start(run_dir, "slow input", input_s=input_s, more=["--checkpoint-every", "0"])
    ports = wait_for_fault(job, mark)
    os.kill(job.rank(1), signal.SIGTERM)
    done = ended_in_time(job, mark, within_s=input_s + ENDS_WITHIN_S, ports=ports)
    assert done.code == 75, done.output
    line = done.only_message
    assert f"stopped at step 48 of {STEPS} (SIGTERM on rank 1 " in line, line
    assert steps_of_checkpoints(run_dir) == [48]
    resumes(run_dir, uninterrupted, resumed_from=48)


@pytest.mark.parametrize("rank", [LONG(0), 1])
def test_a_suspended_rank(rank, uninterrupted, tmp_path):
    """Suspended for longer than the timeout: the rank is named and the job ends."""
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGSTOP", ranks=[rank], more=["--stall-timeout", str(STALL_S)])
    done = job.end(90)
    took_s = time.time() - float(mark.read_text())
    assert STALL_S <= took_s < STALL_S + ENDS_WITHIN_S, f"{took_s:.1f} s\n{done.output}"
    assert done.code == 1, done.output
    line = done.only_message
    assert re.search(rf"no heartbeat from rank {rank} \(host .*\) for \d+ s", line), line
    assert not job.processes()
    if rank:
        resumes(run_dir, uninterrupted, resumed_from=40)


def test_a_hanging_rank(tmp_path):
    """It sends heartbeats but makes no progress: the others wait for it in a reduction, and its stack is reported."""
    job, mark = start(tmp_path / "run", "hang", more=["--stall-timeout", str(STALL_S)])
    done = job.end(90)
    assert time.time() - float(mark.read_text()) < STALL_S + ENDS_WITHIN_S, done.output
    assert done.code == 1, done.output
    assert re.search(
        rf"no rank made progress for {STALL_S} s; the others wait for rank 1 \(host .*\)\. ", done.output
    ), done.output
    assert re.search(r"rank 1 \(host .*\) at step 47 \(training\):", done.output), done.output
    assert re.search(r"faulty.py:\d+, in inject", done.output), done.output
    assert not job.processes()


def test_a_briefly_suspended_rank(uninterrupted, tmp_path):
    """Suspended for less than the timeout: the others wait for it, and the result is the same."""
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGSTOP", more=["--stall-timeout", "20"])
    wait_for_fault(job, mark)
    pid = job.rank(1)
    time.sleep(2.5)
    os.kill(pid, signal.SIGCONT)
    done = job.end(60)
    assert done.code == 0, done.output
    assert not done.messages, done.output
    equals(run_dir, uninterrupted, None)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; a checkpoint of the task takes 0.5 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.long
def test_a_temporarily_full_disk(small_disk, uninterrupted):
    """Training continues, each failure is reported, and checkpoints are written again when space is free."""
    run_dir = small_disk / "run"
    spec = {"ranks": [0], "step": 50, "filler": str(small_disk / "filler"), "free_step": 95}
    spec["checkpoint"] = str(run_dir / "checkpoints" / "step-00000040")
    job, _ = start(run_dir, "fill", **spec, mark=str(small_disk.parent / "time of fault"))
    done = job.end(90)
    assert done.code == 0, done.output
    warnings = [line for line in done.messages if "could not write a checkpoint" in line]
    assert len(warnings) == 2, done.output  # at steps 60 and 80
    assert "No space left" in warnings[0] or "RESOURCE_EXHAUSTED" in warnings[0] or "space" in warnings[0], warnings[0]
    assert steps_of_checkpoints(run_dir) == [40, 100, STEPS]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["weights_sha256"] == uninterrupted["weights_sha256"]


def test_a_permanently_full_disk(small_disk, uninterrupted, tmp_path):
    """After three consecutive failures the job ends; it can resume from earlier checkpoints."""
    run_dir = small_disk / "run"
    filler = small_disk / "filler"
    spec = {"ranks": [0], "step": 50, "filler": str(filler), "checkpoint": str(run_dir / "checkpoints/step-00000040")}
    job, _ = start(run_dir, "fill", **spec, mark=str(tmp_path / "time of fault"))
    done = job.end(90)
    assert done.code == 65, done.output
    assert "3 consecutive failures" in done.output
    assert "Traceback" not in done.output, done.output
    assert steps_of_checkpoints(run_dir) == [20, 40]
    filler.unlink()
    resumes(run_dir, uninterrupted, resumed_from=40)


@pytest.mark.long
def test_a_disk_that_becomes_read_only(small_disk, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    spec = {"ranks": [0], "step": 45, "place": str(checkpoints), "checkpoint": str(checkpoints / "step-00000040")}
    job, _ = start(run_dir, "read-only", **spec)
    done = job.end(90)
    subprocess.run(["umount", "-l", str(run_dir / "checkpoints")], check=True)
    assert done.code == 65, done.output
    assert "Read-only file system" in done.output
    assert "3 consecutive failures" in done.output
    assert steps_of_checkpoints(run_dir) == [20, 40]
    resumes(run_dir, uninterrupted, resumed_from=40)
    # A file system that is read-only from the start.
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    job = run_job([*TRAIN, *flags(small_disk / "run")], ranks=2, timeout_s=60)
    assert job.code == 65, job.output
    assert "--run-dir must be a folder that can be written" in job.output


def test_damaged_checkpoints(uninterrupted, tmp_path):
    """One bit has changed: the damage is reported and the previous checkpoint restored. If none is intact, all stay."""
    run_dir = tmp_path / "run"
    job, mark = start(run_dir, "SIGKILL", step=67)
    ended_in_time(job, mark)
    assert steps_of_checkpoints(run_dir) == [20, 40, 60]
    flip(run_dir / "checkpoints" / "step-00000060" / "state.data-00000-of-00001")
    done = resumes(run_dir, uninterrupted, resumed_from=40)
    assert "step-00000060 is damaged: state.data-00000-of-00001 does not match" in done.output
    assert (run_dir / "checkpoints" / "step-00000060.aside1").is_dir()
    for checkpoint in (run_dir / "checkpoints").iterdir():
        flip(checkpoint / "manifest.json")
    before = everything_in(run_dir)
    (run_dir / "summary.json").unlink()  # otherwise the run is complete
    before.pop("summary.json")
    job = run_job([*TRAIN, *flags(run_dir)], ranks=2, timeout_s=60)
    assert job.code == 65, job.output
    assert "there must be an intact checkpoint" in job.output
    assert everything_in(run_dir) == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.long
def test_unsuitable_folders(tmp_path):
    """Complete, of other options, foreign or from a newer version: the job says which, and the folder is untouched."""
    run_dir = tmp_path / "run"
    job = run_job([*TRAIN, *flags(run_dir, "--steps", "5")], ranks=2, timeout_s=60)
    assert job.code == 0, job.output
    before, lines = {}, []
    cases = {
        "complete": ([], 0, f"run already complete: {tmp_path / 'complete'}, 5 steps"),
        "other options": (["--learning-rate", "0.5"], 65, "--learning-rate 0.002 before, 0.5 now"),
        "foreign": ([], 65, "which holds something else (thesis.txt)"),
        "newer": (["--steps", "9"], 65, "must have format 1 or earlier"),
    }
    for name, (more, *_) in cases.items():
        place = tmp_path / name.replace(" ", "-")
        shutil.copytree(run_dir, place)
        checkpoints = place / "checkpoints"
        if name == "foreign":
            shutil.rmtree(checkpoints)
            checkpoints.mkdir()
            (checkpoints / "thesis.txt").write_text("mine")
        elif name == "newer":
            make_newer(checkpoints / "step-00000005")
        before[place] = everything_in(place)
        lines.append(flags(place, "--steps", "5", *more))
    found = run_commands(lines, ranks=2, folder=tmp_path / "output", timeout_s=90)
    for done, (name, (_, code, message)) in zip(found, cases.items(), strict=True):
        assert done.code == code, (name, done.output)
        assert message in done.output, (name, done.output)
        assert "Traceback" not in done.output, (name, done.output)
    for place, content in before.items():
        assert everything_in(place) == content, place


def make_newer(checkpoint: Path) -> None:
    import hashlib

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["format"] = 2
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    files = sorted(path for path in checkpoint.iterdir() if path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (checkpoint / "SHA256SUMS").write_text(sums)


@pytest.mark.long
def test_a_changed_weight(tmp_path):
    """Ranks whose weights differ are detected at the next check, which names the variable."""
    job, _ = start(tmp_path / "run", "weight", more=["--check-every", "10"])
    done = job.end(90)
    assert done.code == 70, done.output
    line = done.only_message
    assert re.search(r"At step 50 variable .* of rank 1 differs", line), line


@pytest.mark.parametrize("launcher", ["mpirun", LONG("horovodrun --gloo")])
def test_an_exception_in_one_rank(launcher, tmp_path):
    """The job ends in time and reports that rank's error and traceback, no other rank's."""
    job, mark = start(tmp_path / "run", "exception", launcher=launcher)
    done = ended_in_time(job, mark)
    assert done.code == 1, done.output
    line = done.only_message
    assert re.search(r"rank 1 \(host .*\) failed at step 47: ValueError: the step is cursed", line), line
    assert tracebacks(done, launcher) == 1, done.output


TABLES = ["--task", "synthetic-dlrm", "--batch-size", "64"]


@pytest.mark.long
def test_a_rank_with_rows_of_a_table_is_killed(tmp_path):
    """In training, and while its rows are saved: the job ends, and resumes from the last complete checkpoint."""
    options, run_dir, whole_dir = [*OPTIONS, *TABLES], tmp_path / "run", tmp_path / "whole"
    job, mark = start(run_dir, "SIGKILL", step=47, options=options)
    done = ended_in_time(job, mark)
    assert re.search(r"lost connection to rank 1 \(host .*\) at step 4\d", done.only_message), done.output
    assert steps_of_checkpoints(run_dir) == [20, 40]
    mark.unlink()
    pattern = str(run_dir / "checkpoints" / "*step-00000060*")
    job, mark = start(run_dir, "SIGKILL", step=60, options=options, checkpoint=pattern)
    ended_in_time(job, mark)
    assert steps_of_checkpoints(run_dir) in ([20, 40], [20, 40, 60])
    for folder in (run_dir, whole_dir):
        job = run_job([*TRAIN, *options, "--run-dir", str(folder)], ranks=2, timeout_s=90)
        assert job.code == 0, job.output
    found, expected = (json.loads((folder / "summary.json").read_text()) for folder in (run_dir, whole_dir))
    assert found["resumed_from"] in (40, 60)
    assert found["weights_sha256"] == expected["weights_sha256"]
