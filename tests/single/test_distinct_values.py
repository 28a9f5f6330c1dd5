"""Comparisons over ranks send little, however much is compared: what is equal is sent as a digest."""

import pickle
import re
from typing import Any

import keras
import numpy as np
import pytest
from made_up_jobs import ThreadCollectives, on_threads

from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.distinct_values import gather_distinct, most_common
from hvdtrain.distributed.replica_consistency import differing, first_difference
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DisagreementError

LARGE = {f"variable {i}": f"layer_{i}/kernel (1024, 1024) float32" for i in range(400)}


class CountingCollectives(ThreadCollectives):
    """Counts the bytes that this rank contributes."""

    sent_bytes = 0

    def allgather(self, value: Any) -> list[Any]:
        if not (isinstance(value, list) and all(isinstance(each, np.ndarray) for each in value)):
            self.sent_bytes += len(pickle.dumps(value))
        return super().allgather(value)


def ran(action: Any) -> list[tuple[Any, int]]:
    """What it returns or raises on each of four ranks, and the bytes that the rank sends."""

    def run(collectives: CountingCollectives) -> tuple[Any, int]:
        try:
            result = action(collectives)
        except DisagreementError as error:
            result = error
        return result, collectives.sent_bytes

    return on_threads(4, run, CountingCollectives)


def test_equal_values_are_sent_as_digests():
    for values, sent_bytes in ran(lambda collectives: gather_distinct(dict(LARGE), collectives)):
        assert values == [LARGE] * 4
        assert sent_bytes < 100


def test_of_different_values_each_is_sent_once():
    other = LARGE | {"variable 7": "another"}
    results = ran(lambda collectives: gather_distinct(LARGE if collectives.rank % 2 else other, collectives))
    for values, _ in results:
        assert values == [other, LARGE, other, LARGE]
    assert [sent_bytes > 10_000 for _, sent_bytes in results] == [True, True, False, False]


def test_agreement_is_cheap_and_a_difference_is_named():
    for error, sent_bytes in ran(lambda collectives: require_agreement("model", LARGE, collectives)):
        assert error is None
        assert sent_bytes < 100
    own = lambda rank: LARGE | ({"variable 7": 1} if rank == 2 else {"variable 7": True})
    for error, _ in ran(lambda collectives: require_agreement("model", own(collectives.rank), collectives)):
        assert re.match(
            r"all ranks must have the same model\. Received: variable 7: True on ranks 0, 1, 3, 1 on rank 2\. ",
            str(error),
        )


@pytest.mark.parametrize("different", [(), (2,), (0,), (1, 2, 3)])
def test_variables_that_differ(different):
    def compare(collectives: CountingCollectives) -> tuple[list[int], Any]:
        variables = [keras.Variable(np.full(3, i, np.float32), name=f"v{i}") for i in range(100)]
        if collectives.rank in different:
            variables[5].assign(np.full(3, 100 + collectives.rank, np.float32))
        split = differing(variables, collectives)
        found = [i for i, each in enumerate(variables) if id(each) in split]
        return found, first_difference(variables, collectives)

    results = ran(compare)
    for (found, difference), _ in results:
        assert found == ([5] if different else [])
        if not different:
            assert difference is None
    if different in ((2,), (0,)):
        assert {difference for (_, difference), _ in results} == {("v5", f"rank {different[0]}")}
    assert max(sent_bytes for _, sent_bytes in results[1:]) < 1000


def test_a_rank_that_trains_alone_equals_itself():
    variables = [keras.Variable(np.ones(3, np.float32), name="v")]
    assert differing(variables, SingleProcessCollectives(rank=1)) == set()
    assert first_difference(variables, SingleProcessCollectives(rank=1)) is None


def test_most_common():
    assert most_common([b"a", b"b", b"b"]) == b"b"
    assert most_common([b"b", b"a"]) == b"b"
