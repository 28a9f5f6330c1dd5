"""hvdtrain.shard: the parts of all ranks have equal lengths, and cover the data once."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import hvdtrain
from hvdtrain.data.sharding import shard_of
from hvdtrain.errors import DataError, UsageError

SIZE = 3


def shards(*data, drop_remainder=True) -> list[tuple]:
    return [shard_of(data, rank, SIZE, drop_remainder=drop_remainder) for rank in range(SIZE)]


@pytest.mark.parametrize(("drop_remainder", "lengths"), [(True, [3, 3, 3]), (False, [4, 4, 3])])
def test_structures_of_arrays(drop_remainder, lengths, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(11))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    x = {"a": np.arange(11), "b": (tf.range(11), mapped)}
    parts = shards(x, None, np.arange(11) * 10, drop_remainder=drop_remainder)
    assert [len(part[0]["a"]) for part in parts] == lengths
    for rank, (part, missing, y) in enumerate(parts):
        assert part["a"].tolist() == list(range(rank, sum(lengths), SIZE))
        assert part["b"][0].numpy().tolist() == part["b"][1].tolist() == part["a"].tolist()
        assert missing is None
        assert y.tolist() == (part["a"] * 10).tolist()
        assert part["a"].base is x["a"]  # a view: nothing is copied
        assert isinstance(part["b"][1], np.memmap)


@pytest.mark.parametrize("known", [True, False])
def test_datasets(known):
    dataset = tf.data.Dataset.from_tensor_slices(({"a": np.arange(11)}, np.arange(11) * 10))
    for structure in (dataset, dataset.map(lambda x, y: x), dataset.map(lambda x, y: y)):
        data = structure if known else structure.filter(lambda *_: True)
        parts = [list(part.as_numpy_iterator()) for (part,) in shards(data)]
        elements = list(structure.as_numpy_iterator())
        assert parts == [[elements[i] for i in range(rank, 9, SIZE)] for rank in range(SIZE)]
    if known:
        assert [int(part.cardinality()) for (part,) in shards(dataset)] == [3, 3, 3]
        assert [int(part.cardinality()) for (part,) in shards(dataset, drop_remainder=False)] == [4, 4, 3]
        (endless,) = shard_of((dataset.repeat(),), 1, SIZE, drop_remainder=True)
        assert next(iter(endless))[1].numpy() == 10


def test_a_py_dataset():
    class Batches(keras.utils.PyDataset):
        ended = 0

        def __len__(self):
            return 11

        def __getitem__(self, index):
            return np.full((2, 1), index), np.full((2, 1), index)

        def on_epoch_end(self):
            self.ended += 1

    batches = Batches()
    parts = [part for (part,) in shards(batches)]
    assert [part.num_batches for part in parts] == [3, 3, 3]
    assert [part.num_batches for (part,) in shards(batches, drop_remainder=False)] == [4, 4, 3]
    assert [int(parts[1][i][0][0, 0]) for i in range(3)] == [1, 4, 7]
    parts[0].on_epoch_end()
    assert batches.ended == 1


def test_what_cannot_be_sharded_is_refused():
    x, dataset = np.arange(11), tf.data.Dataset.range(2)
    with pytest.raises(DataError, match=r"equally many samples\. Received: \[10, 11\]"):
        shards(x, x[1:])
    with pytest.raises(DataError, match=r"at least one element for each rank\. Received: 2 for 3 ranks"):
        shards(x[:2])
    with pytest.raises(DataError, match="2 for 3 ranks"):
        shards(dataset)
    with pytest.raises(UsageError, match="sharded alone"):
        shards(dataset, x)
    with pytest.raises(UsageError, match="Received: generator"):
        shards(each for each in x)
    with pytest.raises(UsageError, match="Received: int"):
        shards([1, 2, 3])
    with pytest.raises(UsageError, match="Received: nothing"):
        shards()


def test_one_rank_gets_everything():
    hvdtrain.init()
    x, y = hvdtrain.shard(np.arange(5), np.arange(5))
    assert len(x) == len(y) == 5
    assert hvdtrain.shard(np.arange(5)).tolist() == list(range(5))


def test_ragged_tensors_and_sparse_matrices():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [5.0]])
    assert [part.to_list() for (part,) in shards(ragged)] == [[[1.0]], [[2.0, 3.0]], [[4.0]]]
    for sparse in (scipy.sparse.csr_matrix(np.eye(4)), scipy.sparse.coo_matrix(np.eye(4))):
        assert [part.toarray().argmax(1).tolist() for (part,) in shards(sparse)] == [[0], [1], [2]]


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_sparse_tensors(drop_remainder):
    dense = np.random.default_rng(0).integers(0, 2, (11, 4, 2))
    parts = shards(tf.sparse.from_dense(dense), drop_remainder=drop_remainder)
    usable = 9 if drop_remainder else 11
    for rank, (part,) in enumerate(parts):
        assert (tf.sparse.to_dense(part).numpy() == dense[rank:usable:SIZE]).all()
