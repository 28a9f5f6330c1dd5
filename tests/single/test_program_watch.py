"""What the ranks of a user's program tell each other, without Horovod: threads of one process."""

import queue
import threading
import time

import pytest
from made_up_jobs import ThreadCollectives, on_threads

from hvdtrain.fault_tolerance import stall_detection
from hvdtrain.fault_tolerance.channel import open_channel
from hvdtrain.fault_tolerance.program_watch import ProgramWatch

STALL_S = 0.3


@pytest.fixture(autouse=True)
def operations(monkeypatch):
    """A rank that is in this function is in an operation; threads are those of other ranks."""
    monkeypatch.setattr(stall_detection, "_OPERATIONS", (", in wait_in_a_reduction",))
    monkeypatch.setattr(stall_detection, "is_of_the_user", lambda file: False)


def wait_in_a_reduction(seconds: float) -> None:
    time.sleep(seconds)


def read_a_slow_file(seconds: float) -> None:
    time.sleep(seconds)


def read_files(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        read_one_file()
        read_another_file()


def read_one_file() -> None:
    time.sleep(0.033)


def read_another_file() -> None:
    time.sleep(0.041)


def reports(where, *, num_steps=lambda: 4, size: int = 2, stall_s: float = STALL_S) -> list[str]:
    """What rank 0 reports while each rank is in a function of ``where`` for some time."""
    reported: queue.Queue[str] = queue.Queue()

    def run(collectives: ThreadCollectives) -> None:
        channel = open_channel(collectives)
        watch = ProgramWatch(
            collectives.rank, channel, num_steps=num_steps, stall_s=stall_s, report=reported.put_nowait
        )
        where[collectives.rank](3 * STALL_S)
        collectives.barrier()
        watch.announce_end({})

    assert on_threads(size, run) == [None] * size
    return [reported.get() for _ in range(reported.qsize())]


def test_the_rank_that_the_others_wait_for_is_named_with_its_place():
    (text, *_) = reports([wait_in_a_reduction, read_a_slow_file, wait_in_a_reduction], size=3)
    assert text.startswith("hvdtrain: no rank has made a step for 0 s; the others wait for rank 1 (host ")
    assert "HOROVOD_STALL_CHECK_TIME_SECONDS sets the time.\n  rank 1 (host " in text
    assert ", in read_a_slow_file" in text
    assert "at step 4:" in text
    assert "wait_in_a_reduction" not in text


def test_ranks_that_wait_in_different_places_are_all_shown(monkeypatch):
    monkeypatch.setattr(stall_detection, "_OPERATIONS", (", in wait_in_a_reduction", ", in read_a_slow_file"))
    (text, *_) = reports([wait_in_a_reduction, read_a_slow_file])
    assert "ranks are in different places" in text
    assert ", in wait_in_a_reduction" in text
    assert ", in read_a_slow_file" in text


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ([wait_in_a_reduction, wait_in_a_reduction], {}),
        ([wait_in_a_reduction, read_files], {}),
        ([wait_in_a_reduction, read_a_slow_file], {"num_steps": lambda: None}),
        ([wait_in_a_reduction, read_a_slow_file], {"num_steps": time.monotonic}),
        ([wait_in_a_reduction, read_a_slow_file], {"stall_s": 0.0}),
    ],
    ids=["all at the same place", "one computes", "steps are not counted", "steps are made", "switched off"],
)
def test_nothing_is_reported_if(where, options):
    assert reports(where, **options) == []


def test_a_rank_that_does_not_answer_is_named():
    reported = threading.Event()
    texts: list[str] = []

    def report(text: str) -> None:
        texts.append(text)
        reported.set()

    def run(collectives: ThreadCollectives) -> None:
        channel = open_channel(collectives)
        if collectives.rank == 0:
            ProgramWatch(0, channel, num_steps=lambda: 4, stall_s=STALL_S, report=report)
            assert reported.wait(10)
        collectives.barrier()

    on_threads(2, run)
    assert texts[0].endswith(" does not answer.")
    assert "rank 1 (host " in texts[0]


def test_the_first_rank_that_ends_is_known():
    def run(collectives: ThreadCollectives) -> object:
        watch = ProgramWatch(collectives.rank, open_channel(collectives), num_steps=lambda: 4, stall_s=0.0)
        if collectives.rank == 1:
            watch.announce_end({"step": 7})
        return watch.first_end(0.5 if collectives.rank == 1 else 10)

    assert on_threads(2, run) == [(1, {"kind": "end", "step": 7}), None]
