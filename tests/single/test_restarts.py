"""launch/run --restarts with small scripts as jobs, some of which behave like a launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "launch"))

from restarts import OptionError, Options, growing_pauses, take_options  # noqa: E402

# launch/run as it is, but for the environment, which is not looked at.
RUN = """
import sys
sys.path.insert(0, {launch!r})
import bootstrap
{more}bootstrap.ensure_environment = lambda: None
bootstrap.main(sys.argv[1:])
"""

PRELUDE = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from hvdtrain.supervised import note_checkpoint, note_exit_code, note_listener

def log(line):
    with open({log!r}, "a") as file:
        file.write(line + "\\n")

def log_signals(name, exit_code=75, save_s=0.0):
    def save_and_end(number, frame):
        log(f"{{name}} got {{signal.Signals(number).name}}")
        time.sleep(save_s)
        log(f"{{name}} ends")
        sys.exit(exit_code)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, save_and_end)

start = int(os.environ["HVDTRAIN_RESTART"]) + 1
log(f"start {{start}}")
"""


class Job:
    """A script, and what its starts have written down."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.log = folder / "log"
        self.stderr = folder / "stderr"
        self.begun: list[subprocess.Popen] = []
        self.supervisor = ""

    def command(self, script: str, name: str = "job.py") -> list[str]:
        path = self._folder / name
        path.write_text(PRELUDE.format(root=str(ROOT), log=str(self.log)) + script)
        return [sys.executable, str(path)]

    def begin(self, *arguments: str, prepare: Callable[[], object] = lambda: None) -> subprocess.Popen:
        def in_child() -> None:
            # A test run in the background would hand on that it ignores these.
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            prepare()

        with self.stderr.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", RUN.format(launch=str(ROOT / "launch"), more=self.supervisor), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=in_child,
            )
        self.begun.append(process)
        return process

    def run(self, script: str, *options: str) -> int:
        return self.begin(*options, *self.command(script)).wait(timeout=60)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 30
        while line not in self.lines() and not any(line in each for each in self.said()):
            assert time.monotonic() < deadline, f"{line!r} did not come: {self.lines()} {self.said()}"
            time.sleep(0.02)

    def said(self) -> list[str]:
        return self.stderr.read_text().splitlines()

    def pauses(self) -> list[str]:
        return [line.rpartition(" in ")[2] for line in self.said() if "; start " in line]


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    for process in job.begun:
        process.kill()
        process.communicate()


def ends(*endings: str) -> str:
    """A script that ends in another way at each start; its last way stays."""
    return f"endings = {endings}\nexec(endings[min(start, len(endings)) - 1])\n"


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def test_starts_again_until_the_job_succeeds(job):
    script = ends("sys.exit(3)", KILLED, "sys.exit(75)", "sys.exit(0)")
    assert job.run(script, "--restarts", "9", "--restart-pause", "0.01") == 0
    assert job.lines() == ["start 1", "start 2", "start 3", "start 4"]
    assert job.said() == [
        "launch/run: the job died with exit code 3; start 2 of at most 10 in 0.01 s.",
        "launch/run: the job died with exit code 137; start 3 of at most 10 in 0.02 s.",
        "launch/run: the job died with exit code 75; start 4 of at most 10 in 0.04 s.",
    ]


@pytest.mark.parametrize("code", [64, 65, 70, 78])
def test_what_would_fail_again_is_not_started_again(job, code):
    assert job.run(f"sys.exit({code})", "--restarts=3", "--restart-pause=0") == code
    assert job.lines() == ["start 1"]
    assert job.said() == [f"launch/run: the job ended with exit code {code}, which another start would not change."]


@pytest.mark.parametrize(("last", "code"), [("sys.exit(5)", 5), (KILLED, 137)])
def test_the_last_code_is_handed_out_when_no_start_is_left(job, last, code):
    script = ends("sys.exit(3)", "sys.exit(4)", last)
    assert job.run(script, "--restarts=2", "--restart-pause=0") == code
    assert job.lines() == ["start 1", "start 2", "start 3"]
    assert job.said()[-1] == f"launch/run: the job died with exit code {code} in start 3 of at most 3."


def test_no_restart_is_a_number_too(job):
    assert job.run("sys.exit(3)", "--restarts=0") == 3
    assert job.lines() == ["start 1"]


def test_progress_brings_back_the_first_pause(job):
    saved = (None, 10, None, 10, 20, 20)
    script = f"step = {saved}[start - 1]\nstep is None or note_checkpoint(step)\nsys.exit(1)"
    assert job.run(script, "--restarts=5", "--restart-pause=0.01") == 1
    assert job.pauses() == ["0.01 s.", "0.01 s.", "0.02 s.", "0.04 s.", "0.01 s."]


def test_pauses_grow_to_a_minute():
    assert list(islice(growing_pauses(9), 5)) == [9, 18, 36, 60, 60]
    assert list(islice(growing_pauses(90), 2)) == [90, 90]


def test_pauses_are_waited_for(job):
    began = time.monotonic()
    assert job.run(ends("sys.exit(3)", "sys.exit(0)"), "--restarts=1", "--restart-pause=1.5") == 0
    assert time.monotonic() - began > 1.5


def test_the_code_that_the_job_tells_counts_where_its_launcher_makes_1_of_any(job):
    assert job.run("note_exit_code(65)\nsys.exit(1)", "--restarts=3", "--restart-pause=0") == 65
    assert job.lines() == ["start 1"]


def test_what_one_start_told_is_not_taken_for_the_next_ones(job):
    script = ends("note_exit_code(75); sys.exit(1)", "sys.exit(1)")
    assert job.run(script, "--restarts=1", "--restart-pause=0") == 1
    assert "exit code 75; start 2" in job.said()[0]


def test_a_job_that_succeeds_has_succeeded(job):
    assert job.run("note_exit_code(65)", "--restarts=3") == 0
    assert job.said() == []


@pytest.mark.parametrize(
    "told", ["{", "[1]", '{"exit_code": 0}', '{"exit_code": "65", "checkpoint_step": null, "listener": true}']
)
def test_nonsense_in_the_file_says_nothing(job, told):
    script = f"open(os.environ['HVDTRAIN_SUPERVISOR_FILE'], 'w').write({told!r})\nsys.exit(3)"
    assert job.run(script, "--restarts=1", "--restart-pause=0") == 3
    assert job.lines() == ["start 1", "start 2"]


def test_what_a_job_is_started_with(job):
    script = """
file = os.environ["HVDTRAIN_SUPERVISOR_FILE"]
log(f"restart {os.environ['HVDTRAIN_RESTART']}, {sorted(os.listdir(os.path.dirname(file)))}")
log(f"input {sys.stdin.read()!r}, blocked {signal.pthread_sigmask(signal.SIG_BLOCK, [])}")
log(os.path.dirname(file))
sys.exit(3)
"""
    process = job.begin("--restarts=1", "--restart-pause=0", *job.command(script))
    # Its input stays open, and says nothing.
    assert process.wait(timeout=60) == 3
    first, second = job.lines()[:4], job.lines()[4:]
    assert first[1:3] == ["restart 0, []", "input '', blocked set()"]
    assert second[1:3] == ["restart 1, []", "input '', blocked set()"]
    assert not Path(first[3]).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_is_passed_on_and_ends_the_starts(job, number):
    process = job.begin("--restarts=3", *job.command("log_signals('job')\nlog('up')\ntime.sleep(60)"))
    job.wait_for("up")
    process.send_signal(number)
    assert process.wait(timeout=10) == 75
    assert job.lines() == ["start 1", "up", f"job got {number.name}", "job ends"]
    assert job.said() == [f"launch/run: {number.name} is passed on to the job, which is not started again."]


COUNTING = """
def count(number, frame):
    log(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, count)
log("up")
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    time.sleep(0.05)
sys.exit(9)
"""


def test_ctrl_c_in_a_terminal_reaches_the_job_once(job):
    process = job.begin("--restarts=3", *job.command(COUNTING.format(seconds=2)))
    job.wait_for("up")
    # The terminal signals the whole group.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "SIGINT"]


def test_signals_right_after_each_other_are_one(job):
    process = job.begin("--restarts=3", *job.command(COUNTING.format(seconds=2)))
    job.wait_for("up")
    process.send_signal(signal.SIGINT)
    job.wait_for("SIGINT")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "SIGINT"]


def test_a_second_signal_later_on_is_passed_on_too(job):
    process = job.begin("--restarts=3", *job.command(COUNTING.format(seconds=3)))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "SIGTERM", "SIGTERM"]


def test_a_lost_terminal_stops_the_job(job):
    process = job.begin("--restarts=3", *job.command("log_signals('job')\nlog('up')\ntime.sleep(60)"))
    job.wait_for("up")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=10) == 75
    assert job.lines()[2:] == ["job got SIGTERM", "job ends"]


def test_nohup_holds(job):
    process = job.begin(
        "--restarts=3",
        *job.command("log('up')\ntime.sleep(1)"),
        prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    job.wait_for("up")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=10) == 0
    assert job.said() == []


def test_a_signal_ends_a_pause_at_once(job):
    process = job.begin("--restarts=3", "--restart-pause=60", *job.command("sys.exit(3)"))
    job.wait_for("start 2 of at most 4 in 60 s")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 3
    assert job.lines() == ["start 1"]


# Like a launcher: the rank is in a group of its own, and its code becomes 1.
LAUNCHER = """
log_signals("launcher", exit_code=143)
rank = subprocess.Popen([sys.executable, {rank!r}], start_new_session=True)
rank.wait()
sys.exit(1)
"""


def with_rank(job: Job, script: str) -> list[str]:
    return job.command(LAUNCHER.format(rank=job.command(script, "rank.py")[1]))


def test_the_first_signal_goes_to_the_rank_that_listens_alone(job):
    rank = "log_signals('rank', save_s=0.5)\nnote_listener()\nnote_exit_code(75)\nlog('up')\ntime.sleep(60)"
    process = job.begin("--restarts=3", *with_rank(job, rank))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75
    assert job.lines()[3:] == ["rank got SIGTERM", "rank ends"]


def test_the_second_signal_goes_to_the_launcher(job):
    rank = "log_signals('rank', save_s=3)\nnote_listener()\nlog('up')\ntime.sleep(60)"
    process = job.begin("--restarts=3", *with_rank(job, rank))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    job.wait_for("rank got SIGTERM")
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert job.lines()[3:] == ["rank got SIGTERM", "launcher got SIGTERM", "launcher ends"]
    assert job.said()[-1] == "launch/run: SIGTERM is passed on to the job once more."


@pytest.mark.parametrize("whose", ["another's", "nobody's"])
def test_a_listener_that_is_none_of_the_job_is_left_alone(job, whose):
    other = subprocess.Popen(["sleep", "60"])
    try:
        if whose == "nobody's":
            other.kill()
            other.wait()
        script = f"os.getpid = lambda: {other.pid}\nnote_listener()\nlog_signals('job')\nlog('up')\ntime.sleep(60)"
        process = job.begin("--restarts=3", *job.command(script))
        job.wait_for("up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 75
        assert job.lines()[2:] == ["job got SIGTERM", "job ends"]
        assert whose == "nobody's" or other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_shell_that_dies_at_once_does_not_hide_a_job_that_still_saves(job):
    saving = job.command("log_signals('job', save_s=1.5)\nlog('up')\ntime.sleep(60)")
    process = job.begin("--restarts=3", "sh", "-c", f"{' '.join(saving)}; true")
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert job.lines()[2:] == ["job got SIGTERM", "job ends"]


# Leaves a dead process in its group, for which nobody waits.
HAUNTED = """
group = os.getpid()
if os.fork() == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        os.setpgid(0, group)
        os._exit(0)
    time.sleep(1)
    log("up")
    time.sleep(10)
    os._exit(0)
time.sleep(60)
"""


def test_a_launcher_that_outlives_its_job_is_killed(job):
    """As mpirun does where a host is cut off; what it has started in other groups too."""
    job.supervisor = "import restarts\nrestarts.LAUNCHER_ENDS_S = 0.5\n"
    helper = "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    process = job.begin("--restarts=0", *job.command(f"{helper}note_exit_code(70)\nlog('up')\ntime.sleep(60)"))
    assert process.wait(timeout=10) == 70
    assert "but not its launcher" in job.said()[0]
    # Its output ends: nobody is left who could write to it.
    assert process.communicate(timeout=5)[0] == ""


def test_a_launcher_without_ranks_here_gets_a_signal_that_it_passes_on(job):
    job.supervisor = (
        "import functools, signal\nbootstrap.supervise = functools.partial(bootstrap.supervise, stop_signal=10)\n"
    )
    script = "signal.signal(signal.SIGUSR1, lambda *_: log('passes it on'))\nlog_signals('launcher')\nlog('up')\n"
    process = job.begin("--restarts=0", *job.command(f"{script}while True: time.sleep(0.1)"))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    job.wait_for("passes it on")
    time.sleep(1.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75
    assert job.lines()[2:] == ["passes it on", "launcher got SIGTERM", "launcher ends"]


def test_the_dead_are_not_waited_for(job):
    process = job.begin("--restarts=3", *job.command(HAUNTED))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143


def test_options_stand_before_the_command():
    assert take_options(["true", "--restarts", "3"]) == (None, ["true", "--restarts", "3"])
    assert take_options(["--restarts", "3", "true", "--restarts=4"]) == (Options(3, 1.0), ["true", "--restarts=4"])
    assert take_options(["--restart-pause=.5", "--restarts=3"]) == (Options(3, 0.5), [])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--restarts"], "--restarts must be a whole number, at least 0. Received: nothing."),
        (["--restarts=", "true"], "Received: nothing."),
        (["--restarts", "horovodrun", "-np"], "Received: horovodrun."),
        (["--restarts=-1", "true"], "Received: -1."),
        (["--restarts=1.5", "true"], "Received: 1.5."),
        (["--restarts=1", "--restart-pause=nan", "true"], "--restart-pause must be a number of seconds, at least 0."),
        (["--restarts=1", "--restart-pause=inf", "true"], "Received: inf."),
        (["--restarts=1", "--restart-pause=-1", "true"], "Received: -1."),
        (["--restarts=1", "--restart-pause", "soon", "true"], "Received: soon."),
        (["--restart-pause=1", "true"], "--restart-pause must come with --restarts."),
    ],
)
def test_bad_options(arguments, rule):
    with pytest.raises(OptionError) as error:
        take_options(arguments)
    stated, remedy = error.value.args
    assert rule in stated
    assert "launch/run --restarts 3" in remedy
