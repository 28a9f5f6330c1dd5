"""launch/run --restarts: signals to the supervisor, and ends of the job and its launcher."""

import os
import signal
import subprocess

import pytest
from restarted_jobs import Job


def started(job: Job, script: str, **options) -> subprocess.Popen:
    """Starts a job that is restarted up to three times, and waits until it is up."""
    process = job.start("--restarts=3", *job.command(script), **options)
    job.wait_for("up")
    return process


LOGGING = "log_signals('job')\nlog('up')\nwait_for_signals()"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGQUIT, "SIGQUIT"),
        (signal.SIGHUP, "SIGTERM"),  # of a terminal that is lost
    ],
)
def test_a_signal_is_forwarded_and_ends_the_restarts(job, sent, received):
    process = started(job, LOGGING)
    process.send_signal(sent)
    assert process.wait(timeout=10) == 75
    assert job.lines() == ["start 1", "up", f"job got {received}", "job ends"]
    assert job.messages() == [f"launch/run: forwarding {sent.name} to the job, which is not restarted."]


COUNTING = """
def count(number, frame):
    log("got " + signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, count)
log("up")
wait_for_file({finish!r})
time.sleep(0.2)  # A wrongly forwarded signal arrives in this time.
sys.exit(9)
"""


def test_ctrl_c_in_a_terminal_reaches_the_job_once(job):
    process = started(job, COUNTING.format(finish=str(job.finish)))
    # The terminal signals the whole group.
    os.killpg(process.pid, signal.SIGINT)
    job.wait_for("got SIGINT")
    job.finish.touch()
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "got SIGINT"]


def test_signals_in_quick_succession_count_as_one(job):
    process = started(job, COUNTING.format(finish=str(job.finish)))
    process.send_signal(signal.SIGINT)
    job.wait_for("got SIGINT")
    process.send_signal(signal.SIGTERM)
    job.finish.touch()
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "got SIGINT"]


def test_a_later_second_signal_is_forwarded_too(job):
    process = started(job, COUNTING.format(finish=str(job.finish)))
    process.send_signal(signal.SIGTERM)
    job.wait_for("got SIGTERM")
    job.later.touch()
    process.send_signal(signal.SIGTERM)
    job.wait_for("forwarding SIGTERM to the job again")
    job.finish.touch()
    assert process.wait(timeout=10) == 9
    assert job.lines() == ["start 1", "up", "got SIGTERM", "got SIGTERM"]


def test_sighup_stays_ignored_under_nohup(job):
    script = f"log('up')\nwait_for_file({str(job.finish)!r})\ntime.sleep(0.2)"
    process = started(job, script, prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    job.finish.touch()
    assert process.wait(timeout=10) == 0
    assert job.messages() == []


def test_a_signal_ends_a_pause_at_once(job):
    process = job.start("--restarts=3", "--restart-pause=60", *job.command("sys.exit(3)"))
    job.wait_for("start 2 of at most 4 in 60 s")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 3
    assert job.lines() == ["start 1"]


# Acts as a launcher: the rank is in a separate process group, and its exit code becomes 1.
LAUNCHER = """
log_signals("launcher", exit_code=143)
rank = subprocess.Popen([sys.executable, {rank!r}], start_new_session=True)
rank.wait()
sys.exit(1)
"""


def with_rank(job: Job, script: str) -> list[str]:
    return job.command(LAUNCHER.format(rank=job.command(script, "rank.py")[1]))


def test_the_first_signal_goes_to_the_listener_only(job):
    rank = "log_signals('rank', save_s=0.5)\nnote_listener()\nnote_exit_code(75)\nlog('up')\nwait_for_signals()"
    process = job.start("--restarts=3", *with_rank(job, rank))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75
    assert job.lines()[3:] == ["rank got SIGTERM", "rank ends"]


def test_the_second_signal_goes_to_the_launcher(job):
    rank = "log_signals('rank', save_s=3)\nnote_listener()\nlog('up')\nwait_for_signals()"
    process = job.start("--restarts=3", *with_rank(job, rank))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    job.wait_for("rank got SIGTERM")
    job.later.touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert job.lines()[3:] == ["rank got SIGTERM", "launcher got SIGTERM", "launcher ends"]
    assert job.messages()[-1] == "launch/run: forwarding SIGTERM to the job again."


@pytest.mark.parametrize("whose", ["another job's", "ended"])
def test_a_listener_outside_the_job_is_not_signalled(job, whose):
    other = subprocess.Popen(["sleep", "60"])
    try:
        if whose == "ended":
            other.kill()
            other.wait()
        script = f"os.getpid = lambda: {other.pid}\nnote_listener()\nlog_signals('job')\nlog('up')\nwait_for_signals()"
        process = started(job, script)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 75
        assert job.lines()[2:] == ["job got SIGTERM", "job ends"]
        assert whose == "ended" or other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_waits_for_a_job_that_still_saves_when_its_shell_has_ended(job):
    saving = job.command("log_signals('job', save_s=1.5)\nlog('up')\nwait_for_signals()")
    process = job.start("--restarts=3", "sh", "-c", f"{' '.join(saving)}; true")
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    assert job.lines()[2:] == ["job got SIGTERM", "job ends"]


# Leaves a zombie in its process group.
WITH_ZOMBIE = """
group = os.getpid()
if os.fork() == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        os.setpgid(0, group)
        os._exit(0)
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    log("up")
    time.sleep(10)
    os._exit(0)
wait_for_signals()
"""


def test_a_launcher_that_outlives_its_job_is_killed(job):
    """As mpirun does if a host is disconnected; processes that it has started in other groups are killed too."""
    job.supervisor = "import restarts\nrestarts.LAUNCHER_TIMEOUT_S = 0.5\n"
    helper = "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    process = job.start("--restarts=0", *job.command(f"{helper}note_exit_code(70)\nlog('up')\nwait_for_signals()"))
    assert process.wait(timeout=10) == 70
    assert "but its launcher has not" in job.messages()[0]
    # Its output ends: no process is left that could write to it.
    assert process.communicate(timeout=5)[0] == ""


def test_a_launcher_without_local_ranks_gets_the_stop_signal(job):
    job.supervisor = "bootstrap.supervise = functools.partial(bootstrap.supervise, stop_signal=10)\n"
    script = "signal.signal(signal.SIGUSR1, lambda *_: log('forwards it'))\nlog_signals('launcher')\nlog('up')\n"
    process = job.start("--restarts=0", *job.command(f"{script}while True: signal.pause()"))
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    job.wait_for("forwards it")
    job.later.touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 75
    assert job.lines()[2:] == ["forwards it", "launcher got SIGTERM", "launcher ends"]


def test_does_not_wait_for_zombies(job):
    process = started(job, WITH_ZOMBIE)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143
