"""launch/run --restarts: exit codes, pauses and options."""

import sys
from itertools import islice
from pathlib import Path

import pytest
from restarted_jobs import ROOT

sys.path.insert(0, str(ROOT / "launch"))

from restarts import OptionError, Options, restart_pauses, take_options


def ends(*endings: str) -> str:
    """Returns a script that ends in a different way at each start, and in the last way from then on."""
    return f"endings = {endings}\nexec(endings[min(start, len(endings)) - 1])\n"


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def test_restarts_until_the_job_succeeds(job):
    script = ends("sys.exit(3)", KILLED, "sys.exit(75)", "sys.exit(0)")
    assert job.run(script, "--restarts", "9", "--restart-pause", "0.01") == 0
    assert job.lines() == ["start 1", "start 2", "start 3", "start 4"]
    assert job.messages() == [
        "launch/run: the job ended with exit code 3; start 2 of at most 10 in 0.01 s.",
        "launch/run: the job ended with exit code 137; start 3 of at most 10 in 0.02 s.",
        "launch/run: the job ended with exit code 75; start 4 of at most 10 in 0.04 s.",
    ]


@pytest.mark.parametrize("code", [64, 65, 70, 78])
def test_a_job_that_would_fail_again_is_not_restarted(job, code):
    assert job.run(f"sys.exit({code})", "--restarts=3", "--restart-pause=0") == code
    assert job.lines() == ["start 1"]
    assert job.messages() == [f"launch/run: the job ended with exit code {code}, which a restart would not change."]


@pytest.mark.parametrize(("last", "code"), [("sys.exit(5)", 5), (KILLED, 137)])
def test_returns_the_last_code_when_no_restart_is_left(job, last, code):
    script = ends("sys.exit(3)", "sys.exit(4)", last)
    assert job.run(script, "--restarts=2", "--restart-pause=0") == code
    assert job.lines() == ["start 1", "start 2", "start 3"]
    assert job.messages()[-1] == f"launch/run: the job ended with exit code {code} in start 3 of at most 3."


def test_zero_restarts(job):
    assert job.run("sys.exit(3)", "--restarts=0") == 3
    assert job.lines() == ["start 1"]


def test_progress_resets_the_pause(job):
    saved = (None, 10, None, 10, 20, 20)
    script = f"step = {saved}[start - 1]\nstep is None or note_checkpoint(step)\nsys.exit(1)"
    assert job.run(script, "--restarts=5", "--restart-pause=0.01") == 1
    assert job.pauses() == ["0.01 s.", "0.01 s.", "0.02 s.", "0.04 s.", "0.01 s."]


def test_pauses_grow_up_to_a_minute():
    assert list(islice(restart_pauses(9), 5)) == [9, 18, 36, 60, 60]
    assert list(islice(restart_pauses(90), 2)) == [90, 90]


def test_waits_for_the_pause(job):
    script = ends("log(str(time.monotonic())); sys.exit(3)", "log(str(time.monotonic()))")
    assert job.run(script, "--restarts=1", "--restart-pause=0.5") == 0
    first_end, second_start = (float(line) for line in job.lines() if not line.startswith("start"))
    assert second_start - first_end > 0.5


def test_the_reported_code_counts_if_the_launcher_returns_1(job):
    assert job.run("note_exit_code(65)\nsys.exit(1)", "--restarts=3", "--restart-pause=0") == 65
    assert job.lines() == ["start 1"]


def test_the_status_of_one_start_is_not_used_for_the_next(job):
    script = ends("note_exit_code(75); sys.exit(1)", "sys.exit(1)")
    assert job.run(script, "--restarts=1", "--restart-pause=0") == 1
    assert "exit code 75; start 2" in job.messages()[0]


def test_success_of_the_launcher_counts(job):
    assert job.run("note_exit_code(65)", "--restarts=3") == 0
    assert job.messages() == []


@pytest.mark.parametrize(
    "status", ["{", "[1]", '{"exit_code": 0}', '{"exit_code": "65", "checkpoint_step": null, "listener": true}']
)
def test_an_invalid_status_is_ignored(job, status):
    script = f"open(os.environ['HVDTRAIN_SUPERVISOR_FILE'], 'w').write({status!r})\nsys.exit(3)"
    assert job.run(script, "--restarts=1", "--restart-pause=0") == 3
    assert job.lines() == ["start 1", "start 2"]


def test_the_environment_of_a_job(job):
    script = """
file = os.environ["HVDTRAIN_SUPERVISOR_FILE"]
log(f"restart {os.environ['HVDTRAIN_RESTART']}, {sorted(os.listdir(os.path.dirname(file)))}")
log(f"input {sys.stdin.read()!r}, blocked {signal.pthread_sigmask(signal.SIG_BLOCK, [])}")
log(os.path.dirname(file))
sys.exit(3)
"""
    process = job.start("--restarts=1", "--restart-pause=0", *job.command(script))
    # The supervisor's own input stays open and empty.
    assert process.wait(timeout=60) == 3
    first, second = job.lines()[:4], job.lines()[4:]
    assert first[1:3] == ["restart 0, []", "input '', blocked set()"]
    assert second[1:3] == ["restart 1, []", "input '', blocked set()"]
    assert not Path(first[3]).exists()


def test_options_precede_the_command():
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
def test_invalid_options(arguments, rule):
    with pytest.raises(OptionError) as error:
        take_options(arguments)
    stated, remedy = error.value.args
    assert rule in stated
    assert "launch/run --restarts 3" in remedy
