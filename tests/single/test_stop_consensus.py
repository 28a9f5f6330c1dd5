"""All ranks agree on one check to stop at."""

import random
import re
import signal
import threading
import time

import pytest
from made_up_jobs import ThreadCollectives, on_threads, wait_until

from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.stop_consensus import StopPoint, StopVote


@pytest.mark.parametrize("seed", range(80))
def test_ranks_agree_on_one_check(seed):
    """Some checks are followed by a collective: a rank that stopped at another check would leave the others in it."""
    choose = random.Random(seed)
    size = choose.randint(2, 4)
    checks = choose.randint(1, 60)
    collective_checks = {check for check in range(checks) if choose.random() < choose.choice((0.1, 0.9))}
    # Up to three ranks request a stop, one of them perhaps after its last check.
    requests = {choose.randrange(size): choose.randrange(checks + 1) for _ in range(choose.randint(1, 3))}
    pauses = [[choose.choice((0, 0, 0, 0.0005, 0.002)) for _ in range(checks)] for _ in range(size)]

    def run(collectives: ThreadCollectives) -> int | None:
        with JobWatch(collectives) as watch:
            for check in range(checks):
                if requests.get(collectives.rank) == check:
                    watch.request_stop(f"rank {collectives.rank}")
                time.sleep(pauses[collectives.rank][check])
                if watch.check():
                    assert watch.stop_requested
                    assert watch.stop_reason in {f"rank {rank}" for rank in requests}
                    return check
                if check in collective_checks:
                    collectives.barrier()
            if requests.get(collectives.rank) == checks:
                watch.request_stop("too late")
            return None

    results = on_threads(size, run)
    assert len(set(results)) == 1, results
    assert results[0] is None or results[0] in range(checks), results


def test_a_rank_that_waits_for_the_decision_does_not_block_the_others():
    """Rank 1 has passed no check and blocks at its first, while rank 0 waits for it in a collective."""
    size, order = 2, []

    def run(collectives: ThreadCollectives) -> list[bool]:
        with JobWatch(collectives) as watch:
            answers = []
            if collectives.rank == 0:
                answers.append(watch.check())
            collectives.barrier()
            if collectives.rank == 1:
                watch.request_stop("a test")
                wait_until(lambda: watch.stop_requested)
                answers.append(watch.check())
                order.append("rank 1 continues")
            else:
                order.append("rank 0 waits")
            collectives.barrier()
            return [*answers, watch.check()]

    assert on_threads(size, run) == [[False, True]] * 2
    assert order == ["rank 0 waits", "rank 1 continues"]


def test_a_stop_request_after_rank_0_has_left_has_no_effect():
    has_left = threading.Event()

    def run(collectives: ThreadCollectives) -> list[bool]:
        watch = JobWatch(collectives)
        with watch:
            answers = [watch.check()]
            if collectives.rank == 1:
                has_left.wait(10)
                watch.request_stop("a test")
            answers.append(watch.check())
        if collectives.rank == 0:
            has_left.set()
        return answers

    assert on_threads(2, run) == [[False, False]] * 2


def test_rank_0_may_leave_before_it_decides():
    """It has then passed all checks, and blocked ranks must pass them too."""
    point = StopPoint()
    point.propose("a test")
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(point.check()), daemon=True)
    thread.start()
    thread.join(0.1)
    assert answers == []
    assert point.withdraw() == 0
    thread.join(5)
    assert answers == [False]


def test_one_rank_stops_at_its_next_check(start):
    def run(collectives: ThreadCollectives) -> list[bool]:
        with JobWatch(collectives) as watch:
            assert watch.stop_reason is None
            answers = [watch.check(), watch.check()]
            watch.request_stop("a test")
            wait_until(lambda: watch.stop_requested)
            return [*answers, watch.check(), watch.check()]

    assert on_threads(1, run) == [[False, False, True, True]]
    job = start("training", 1)
    job.wait_for("ready")
    job.ranks[0].send_signal(signal.SIGINT)
    (rank,) = job.ended(3)
    assert rank.code == 75, rank
    assert re.search(r"stops at \d+: Ctrl-C on rank 0 \(host .+\)", rank.output)


def test_the_vote_is_decided_once():
    vote = StopVote(2)
    vote.record(1, 7)  # It leaves.
    assert vote.decision() is None
    assert vote.open()
    assert not vote.open()
    vote.record(0, 3)
    assert vote.decision() == 8
    assert vote.decision() is None


def test_a_check_is_fast():
    def run(collectives: ThreadCollectives) -> float:
        with JobWatch(collectives) as watch:
            began = time.perf_counter()
            for step in range(10_000):
                watch.check()
                watch.heartbeat("training", step)
            return time.perf_counter() - began

    assert on_threads(1, run)[0] < 0.5
