"""Ranks that are killed, stopped, stuck or that fail: real processes and signals, without Horovod."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from made_up_jobs import ThreadCollectives

from hvdtrain.errors import UsageError
from hvdtrain.failure import JobWatch
from hvdtrain.failure.position import Position, Standstill

GOES_ON = r"The job ends; started again, it goes on from its last checkpoint\."


@pytest.mark.parametrize(("size", "lost"), [(2, 0), (3, 2), (3, 0)])
def test_a_killed_rank_ends_the_job_with_one_line(size, lost, start):
    job = start("waiting", size)
    job.wait_for("ready")
    job.ranks[lost].kill()
    others = [rank for rank in range(size) if rank != lost]
    job.ranks[others[0]].wait(2)
    if lost == 0:
        # A launcher ends all when the first one ends: that is the one that tells.
        time.sleep(0.2)
        assert all(job.ranks[rank].poll() is None for rank in others[1:])
    ranks = job.ended(2, *others)
    assert [rank.code for rank in ranks] == [1] * len(others), ranks
    line = rf"hvdtrain: rank {lost} \(host .+\) is gone at step 120 \(killed, or its host was lost\)\. {GOES_ON}\n"
    assert re.fullmatch(line, "".join(rank.errors for rank in ranks))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_lost_rank_has_come_as_far_as_is_known(ahead, start):
    """What was heard of it may be a second old, or this rank behind it."""
    job = start(f"rank_{ahead}_is_ahead")
    job.wait_for("ready")
    job.ranks[1].kill()
    (rank,) = job.ended(2, 0)
    assert re.match(r"hvdtrain: rank 1 \(host .+\) is gone at step 121 ", rank.errors), rank


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named(start, stopped):
    job = start("waiting", 3, stall_timeout_s=1.2)
    job.wait_for("ready")
    job.ranks[stopped].send_signal(signal.SIGSTOP)
    ranks = job.ended(5, 1 - stopped, 2)
    assert [rank.code for rank in ranks] == [1, 1], ranks
    line = (
        rf"hvdtrain: rank {stopped} \(host .+\) has been silent for 1.2 s, last heard of at step 120 \(evaluation\)\. "
        rf"{GOES_ON}"
    )
    assert re.fullmatch(line + "\n", "".join(rank.errors for rank in ranks))
    job.ranks[stopped].send_signal(signal.SIGCONT)
    (after,) = job.ended(3, stopped)
    assert (after.code, after.errors) == (1, ""), after


def test_short_stops_are_forgiven(start):
    """Of one rank, then of all, as when their host is suspended: longer than the timeout even."""
    job = start("beating", 2, stall_timeout_s=1.2)
    job.wait_for("ready")
    for stopped, seconds in (([1], 0.6), ([0], 0.6), ([0, 1], 1.5)):
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for rank in stopped:
            job.ranks[rank].send_signal(signal.SIGCONT)
        time.sleep(0.2)
    ranks = job.ended(6)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_a_rank_that_holds_up_the_others_is_named_with_its_stack(start):
    ranks = start("hung", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    first, *lines = text.splitlines()
    name = r"rank 1 \(host .+\)"
    assert re.fullmatch(rf"hvdtrain: no rank has moved on for 1 s; the others wait for {name}\. {GOES_ON}", first), text
    assert re.fullmatch(rf"  {name} at step 2 \(training\):", lines[0]), text
    assert re.fullmatch(r"    .*watched_rank\.py:\d+, in is_stuck_here", lines[-2]), text
    assert lines[-1].endswith("in wait")
    assert len(lines) <= 9
    assert "wait_for_others" not in text


def test_all_positions_are_told_where_no_rank_is_behind(start):
    ranks = start("hung_alike", 3, stall_timeout_s=1.0).ended(6)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    text = "".join(rank.errors for rank in ranks)
    assert re.match(rf"hvdtrain: no rank has moved on for 1 s\. {GOES_ON}\n", text)
    assert re.search(r"  rank 0 \(host .+\), rank 2 \(host .+\) at step 7 \(training\):\n(    .+\n)*", text)
    assert re.search(r"  rank 1 \(host .+\) at step 7 \(training\):\n(    .+\n)*    .+, in is_stuck_here\n", text)
    assert text.count("hvdtrain:") == 1


def test_one_rank_that_hangs_is_told_with_its_stack(start):
    (rank,) = start("hung_alike", 1, stall_timeout_s=0.5).ended(3)
    assert rank.code == 1
    assert "  rank 0 (host" in rank.errors
    assert "in wait_for_others" in rank.errors


def test_one_rank_that_moves_keeps_the_others_waiting(start):
    ranks = start("one_beats", 2, stall_timeout_s=0.6).ended(7)
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * 2, ranks


def test_a_standstill_ends_with_any_beat():
    standstill = Standstill(100.0)
    standstill.note(0, Position(0), 130.0)
    assert standstill.lasts_s(130.0) == 30.0
    standstill.is_asked = True
    standstill.answer(0, Position(0), [])
    standstill.note(1, Position(1, "training", 5), 140.0)
    assert not standstill.is_asked
    assert standstill.num_answers == 0
    standstill.forgive(7.0)
    assert standstill.lasts_s(150.0) == 3.0


# Errors.


def test_an_error_of_one_rank_ends_the_others(start):
    ranks = start("fails", 3).ended(4)
    assert [rank.code for rank in ranks] == [1] * 3, ranks
    assert re.match(r"hvdtrain: rank 2 \(host .+\) failed at step 4: ValueError: cursed\nTraceback", ranks[2].errors)
    assert ranks[0].errors == ranks[1].errors == ""


def test_an_echo_is_told_only_where_no_cause_comes(start):
    """Horovod's operations fail on rank 0, in one job before it is heard that rank 1 is gone."""
    lost, mismatched = start("echo"), start("echo_without_cause")
    lost.wait_for("ready")
    (lost.folder / "lost").touch()
    time.sleep(0.5)
    lost.ranks[1].kill()
    (rank,) = lost.ended(2, 0)
    assert rank.code == 1
    assert re.fullmatch(r"hvdtrain: rank 1 \(host .+\) is gone .*\n", rank.errors), rank.errors
    ranks = mismatched.ended(6)
    assert [rank.code for rank in ranks] == [1] * 2, ranks
    assert re.match(r"hvdtrain: rank 0 \(host .+\) failed at step 4: RuntimeError: node Horovod", ranks[0].errors)
    assert ranks[1].errors == ""


def test_last_work_is_done_but_not_waited_for_without_end(start):
    job = start("last_work", 3)
    job.wait_for("ready")
    job.ranks[2].kill()
    began = time.monotonic()
    assert [rank.code for rank in job.ended(4.5, 0, 1)] == [1, 1]
    assert time.monotonic() - began > 2
    assert {path.name for path in job.folder.glob("finished*")} == {"finished by 0", "finished by 1"}


def test_a_forked_child_neither_hides_the_end_of_its_rank_nor_catches_signals(start):
    job = start("forked")
    (line,) = job.wait_for("child", 1)
    child = Path("/proc") / line.split()[1]
    try:
        job.wait_for("ready")
        job.ranks[1].kill()
        (rank,) = job.ended(2, 0)
        assert re.search(r"rank 1 \(host .+\) is gone before its first step", rank.errors)
        os.kill(int(child.name), signal.SIGTERM)
        time.sleep(0.1)
        # Gone, or left over by whoever takes in orphans here.
        assert not child.exists() or child.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"
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
