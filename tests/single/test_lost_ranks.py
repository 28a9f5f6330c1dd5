"""Ranks that are killed, stopped, hang or fail: real processes and signals, without Horovod."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from made_up_jobs import ThreadCollectives, wait_until

from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.channel import wait_for
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.stall_detection import Position, StallDetector, stack_of
from hvdtrain.system import processes
from hvdtrain.system.background import BackgroundTask

REMEDY = r"The job ends; restart it to resume from its last checkpoint\."


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (3, 2), (3, 0)])
def test_a_killed_rank_ends_the_job_with_one_line(size, lost, start):
    job = start("waiting", size)
    job.wait_for("ready")
    job.ranks[lost].kill()
    others = [rank for rank in range(size) if rank != lost]
    job.ranks[others[0]].wait(2)
    if lost == 0:
        # A launcher kills all ranks when the first one ends: that must be the rank that reports the loss.
        for rank in others[1:]:
            with pytest.raises(subprocess.TimeoutExpired):
                job.ranks[rank].wait(0.2)
    ranks = job.ended(2, *others)
    assert [rank.code for rank in ranks] == [1] * len(others), ranks
    line = rf"hvdtrain: lost connection to rank {lost} \(host .+\) at step 120: killed, or host down\. {REMEDY}\n"
    assert re.fullmatch(line, "".join(rank.errors for rank in ranks))


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_step_of_a_lost_rank_is_the_latest_known(ahead, start):
    """Its last heartbeat may be a second old, or this rank may be behind it."""
    job = start(f"rank_{ahead}_is_ahead")
    job.wait_for("ready")
    job.ranks[1].kill()
    (rank,) = job.ended(2, 0)
    assert re.match(r"hvdtrain: lost connection to rank 1 \(host .+\) at step 121: ", rank.errors), rank


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named(start, stopped):
    job = start("waiting", 3, stall_timeout_s=1.2)
    job.wait_for("ready")
    job.ranks[stopped].send_signal(signal.SIGSTOP)
    ranks = job.ended(5, 1 - stopped, 2)
    assert [rank.code for rank in ranks] == [1, 1], ranks
    line = (
        rf"hvdtrain: no heartbeat from rank {stopped} \(host .+\) for 1.2 s, last seen at step 120 \(evaluation\)\. "
        rf"{REMEDY}"
    )
    assert re.fullmatch(line + "\n", "".join(rank.errors for rank in ranks))
    job.ranks[stopped].send_signal(signal.SIGCONT)
    (after,) = job.ended(3, stopped)
    assert (after.code, after.errors) == (1, ""), after


def test_short_suspensions_extend_deadlines(start):
    """Of one rank, then of all, as when their host is suspended: even for longer than the timeout."""
    job = start("progressing", 2, stall_timeout_s=1.2)
    job.wait_for("ready")
    for number, (stopped, seconds) in enumerate((([1], 0.6), ([0], 0.6), ([0, 1], 1.5))):
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGCONT)
        (job.folder / f"ping{number}").touch()
        job.wait_for(f"pong {number}")
    (job.folder / "finish").touch()
    ranks = job.ended(6)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_the_rank_that_the_others_wait_for_is_named_with_its_stack(start):
    ranks = start("hung", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    first, *lines = text.splitlines()
    name = r"rank 1 \(host .+\)"
    assert re.fullmatch(rf"hvdtrain: no rank made progress for 1 s; the others wait for {name}\. {REMEDY}", first), text
    assert re.fullmatch(rf"  {name} at step 2 \(training\):", lines[0]), text
    assert re.fullmatch(r"    .*watched_rank\.py:\d+, in is_stuck_here", lines[-2]), text
    assert lines[-1].endswith("in wait")
    assert len(lines) <= 9
    assert "wait_for_others" not in text


def test_all_positions_are_reported_if_no_rank_is_behind(start):
    ranks = start("hung_alike", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    assert re.match(rf"hvdtrain: no rank made progress for 1 s\. {REMEDY}\n", text)
    assert re.search(r"  rank 0 \(host .+\), rank 2 \(host .+\) at step 7 \(training\):\n(    .+\n)*", text)
    assert re.search(r"  rank 1 \(host .+\) at step 7 \(training\):\n(    .+\n)*    .+, in is_stuck_here\n", text)
    assert text.count("hvdtrain:") == 1


def test_a_single_rank_that_hangs_is_reported_with_its_stack(start):
    (rank,) = start("hung_alike", 1, stall_timeout_s=0.5).ended(3)
    assert rank.code == 1
    assert "  rank 0 (host" in rank.errors
    assert "in wait_for_others" in rank.errors


@pytest.mark.parametrize("what", ["one_progresses", "one_transfers"])
def test_progress_of_one_rank_is_no_stall(what, start):
    ranks = start(what, 2, stall_timeout_s=0.6).ended(7)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_any_heartbeat_ends_a_stall():
    stall = StallDetector(100.0)
    stall.update(0, Position(0), 130.0)
    assert stall.stalled_s(130.0) == 30.0
    stall.stacks_requested = True
    stall.add_stack(0, Position(0), [])
    stall.update(1, Position(1, "training", 5), 140.0)
    assert not stall.stacks_requested
    assert stall.num_stacks == 0
    stall.extend(7.0)
    assert stall.stalled_s(150.0) == 3.0


# Errors.


def test_an_error_of_one_rank_ends_the_others(start):
    ranks = start("fails", 3).ended(4)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    assert re.match(r"hvdtrain: rank 2 \(host .+\) failed at step 4: ValueError: cursed\nTraceback", ranks[2].errors)
    assert ranks[0].errors == ranks[1].errors == ""


def test_a_secondary_error_is_reported_only_without_a_cause(start):
    """Horovod's operations fail on rank 0; in one of the jobs, before the loss of rank 1 is detected."""
    lost, mismatched = start("secondary_error"), start("primary_error")
    lost.wait_for("waits for the cause", 0)
    lost.ranks[1].kill()
    (rank,) = lost.ended(2, 0)
    assert rank.code == 1
    assert re.fullmatch(r"hvdtrain: lost connection to rank 1 \(host .+\) .*\n", rank.errors), rank.errors
    ranks = mismatched.ended(6)
    assert [rank.code for rank in ranks] == [1] * 2, ranks
    assert re.match(r"hvdtrain: rank 0 \(host .+\) failed at step 4: RuntimeError: node Horovod", ranks[0].errors)
    assert ranks[1].errors == ""


def test_exit_actions_run_within_a_time_limit(start):
    job = start("exit_actions", 3)
    job.wait_for("ready")
    job.ranks[2].kill()
    began = time.monotonic()
    assert [rank.code for rank in job.ended(4.5, 0, 1)] == [1, 1]
    assert time.monotonic() - began > 2
    assert {path.name for path in job.folder.glob("finished*")} == {"finished by 0", "finished by 1"}


def test_a_forked_child_neither_hides_the_loss_of_its_rank_nor_catches_signals(start):
    job = start("forked")
    (line,) = job.wait_for("child", 1)
    child = Path("/proc") / line.split()[1]
    try:
        job.wait_for("ready")
        job.ranks[1].kill()
        (rank,) = job.ended(2, 0)
        assert re.search(r"lost connection to rank 1 \(host .+\) before its first step", rank.errors)
        os.kill(int(child.name), signal.SIGTERM)
        # It stays as a zombie if this host's init process does not reap orphans.
        wait_until(lambda: not processes.is_running(int(child.name)))
    finally:
        if child.exists():
            os.kill(int(child.name), signal.SIGKILL)


@pytest.mark.parametrize("size", [2, 3])
def test_an_orderly_end_is_silent(size, start):
    """The last rank leaves first, then rank 0, then the others."""
    ranks = start("orderly", size, stall_timeout_s=2.0).ended(5)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * size, ranks


def test_arguments_are_checked():
    with pytest.raises(UsageError, match="stall_timeout_s must be"):
        JobWatch(ThreadCollectives(0, [None], threading.Barrier(1)), stall_timeout_s=-1)


def test_a_function_of_the_input_that_blocks_in_another_thread_is_part_of_the_stack():
    blocked, ends = threading.Event(), threading.Event()

    def generate():
        blocked.set()
        ends.wait()

    thread = threading.Thread(target=generate)
    thread.start()
    blocked.wait()
    lines = stack_of(threading.get_ident())
    ends.set()
    thread.join()
    others = [line for line in lines if line.startswith("in another thread: ")]
    assert any(line.endswith("in generate") and "test_lost_ranks.py:" in line for line in others), lines
    assert lines.index(others[0]) > 0
    assert not any(line.endswith("in generate") for line in stack_of(threading.get_ident()))


def test_the_others_wait_for_the_rank_whose_input_blocks():
    """All ranks are at the same step, in TensorFlow; a thread of one of them is in the user's code."""
    step = ["/site-packages/tensorflow/python/eager/execute.py:53, in quick_execute"]
    blocked = [*step, "in another thread: task.py:11, in generate"]
    stall = StallDetector(0.0)
    for rank, stack in enumerate((step, blocked, step)):
        stall.add_stack(rank, Position(15, "training", 15), stack)
    assert stall.ranks_behind() == [1]
    assert stall.report("rank {}".format).splitlines()[0] == "  rank 1 at step 15 (training):"
    stall.add_stack(1, Position(15, "training", 15), step)
    assert stall.ranks_behind() == []


def test_no_rank_is_blamed_that_waits_for_another_thread_or_a_message():
    """As for an average in the background, or the end of an update with a quorum: it may wait for the others."""
    ours, theirs = socket.socketpair()
    task = BackgroundTask(lambda: wait_for([ours], None), "average")
    (reading,) = (thread for thread in threading.enumerate() if thread.name == "average")
    waiting = threading.Thread(target=task.wait)
    waiting.start()
    wait_until(lambda: any("join" in line for line in stack_of(waiting.ident)))
    wait_until(lambda: any("select" in line for line in stack_of(reading.ident)))
    stacks = [stack_of(waiting.ident), stack_of(reading.ident)]
    theirs.close()
    waiting.join()
    for stack in stacks:
        own = [line for line in stack if not line.startswith("in another thread: ")]
        stall = StallDetector(0.0)
        stall.add_stack(0, Position(15, "training", 15), own)
        stall.add_stack(1, Position(15, "training", 15), ["/tensorflow/python/eager/execute.py:53, in quick_execute"])
        assert stall.ranks_behind() == [], own
