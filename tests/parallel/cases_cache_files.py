"""On all ranks: data sets that are cached in files, all under the same path."""

import itertools

import pytest
import tensorflow as tf
from models import SHARED_GPUS

import hvdtrain
from hvdtrain.distributed import runtime

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
NUMBERS = list(range(12 * SIZE))


def read(dataset) -> list[int]:
    return [int(number) for number in dataset]


def read_on_all_ranks(dataset) -> list[int]:
    COLLECTIVES.barrier()
    return sorted(itertools.chain.from_iterable(COLLECTIVES.allgather(read(dataset))))


@pytest.mark.parametrize("as_path", [str, lambda path: path], ids=["str", "Path"])
def test_ranks_cache_under_one_path(as_path, folder):
    (folder / "a").mkdir(exist_ok=True)
    path = as_path(folder / "a" / "cache")
    calls = []

    def count(number):
        calls.append(number)
        return number

    numbers = tf.data.Dataset.range(len(NUMBERS)).map(lambda number: tf.numpy_function(count, [number], tf.int64))
    part = hvdtrain.shard(numbers).cache(path)
    for _ in range(2):
        assert read_on_all_ranks(part) == NUMBERS
    assert len(calls) == len(NUMBERS)
    # Another job with another number of ranks has other parts.
    assert all(f"of-{SIZE}." in each.name for each in (folder / "a").iterdir())


def test_all_data_is_cached_before_it_is_divided(folder):
    whole = tf.data.Dataset.range(len(NUMBERS)).cache(filename=str(folder / "cache"))
    for _ in range(2):
        assert read_on_all_ranks(hvdtrain.shard(whole)) == NUMBERS


def test_caches_in_memory_have_no_files(folder):
    for dataset in (tf.data.Dataset.range(5).cache(), tf.data.Dataset.range(5).cache("")):
        assert read(dataset) == read(dataset) == list(range(5))
