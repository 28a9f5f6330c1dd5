"""Objects of any size reach all ranks; short ones in one message."""

import threading

import numpy as np
import pytest

from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.object_messages import allgather_objects


def gathered(values: list) -> tuple[list, list[str]]:
    """What each rank receives, and the names of the messages; each rank is a thread."""
    num_ranks, names = len(values), []
    sent, results = [b""] * num_ranks, [None] * num_ranks
    everyone = threading.Barrier(num_ranks)

    def run(rank: int) -> None:
        def allgather(own: np.ndarray, name: str) -> np.ndarray:
            sent[rank] = own
            everyone.wait(10)
            together = np.concatenate(sent)
            if rank == 0:
                names.append(name)
            everyone.wait(10)
            return together

        results[rank] = allgather_objects(values[rank], num_ranks, allgather)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results, names


def test_short_objects_travel_in_one_message():
    values = [True, ("a digest", b"\0" * 32), None]
    results, names = gathered(values)
    assert results == [values] * 3
    assert len(names) == 1


@pytest.mark.parametrize(("max_bytes", "messages"), [(1 << 30, 2), (300, 12)])
def test_the_remaining_bytes_of_long_objects_follow_in_bounded_messages(max_bytes, messages, monkeypatch):
    monkeypatch.setattr(bounded_messages, "MAX_MESSAGE_BYTES", max_bytes)
    values = [bytes(range(250)) * 5, "short", ["x" * 400]]
    results, names = gathered(values)
    assert results == [values] * 3
    assert names[1:] == ["hvdtrain_allgather_remaining"] * (messages - 1)


def test_lengths_around_that_of_the_first_message():
    for length in range(200, 280):
        values = [b"a" * length, b"b" * (480 - length)]
        assert gathered(values)[0] == [values] * 2
