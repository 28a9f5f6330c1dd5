"""On all ranks: how rows of sharded tables are exchanged; tables in a group exchange theirs together."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from sharded_models import GLOBAL_BATCH, IDS, ROWS, WIDTH, Pooled, X, Y, compiled, float64, on_one_rank, whole_values
from trainings import COLLECTIVES, RANK, SIZE

import hvdtrain
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.layers import EmbeddingGroup, ShardedEmbedding, whole_tables
from hvdtrain.optim import step_reduction


def grouped_model(kind, pooled, join) -> keras.Model:
    """Five features, in four tables of two widths; one table is that of two features."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((IDS,), dtype="int32")
    shared = kind(ROWS, WIDTH, name="shared")
    tables = [
        shared,
        kind(ROWS + 4, WIDTH + 2, name="wide"),
        pooled(ROWS, WIDTH, combiner="mean", padding_id=0, name="pooled"),
        shared,
        kind(ROWS, WIDTH + 2, name="other"),
    ]
    rows = join(tables, [ids[:, 0], ids[:, 1], ids[:, 1:], ids[:, 2], ids[:, 3] + 0 * ids[:, 4]])
    return keras.Model(ids, layers.Dense(NUM_CLASSES, name="logits")(layers.concatenate(rows)))


def test_tables_in_a_group(folder):
    def together(tables, ids):
        return EmbeddingGroup(tables, name="group")(ids)

    def one_by_one(tables, ids):
        return [table(each) for table, each in zip(tables, ids, strict=True)]

    with float64():
        model = grouped_model(ShardedEmbedding, ShardedEmbedding, together)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), loss())
        hvdtrain.broadcast(model)
        single = grouped_model(layers.Embedding, Pooled, one_by_one)
        paths = [each.path.split("/")[-2:] for each in model.weights]
        in_order = {tuple(each.path.split("/")[-2:]): each for each in single.weights}
        single.set_weights([whole_values(model.weights)[paths.index([*each])] for each in in_order])
        single.compile(
            hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1), collectives=SingleProcessCollectives()), loss()
        )
        model.fit(X[RANK:240:SIZE], Y[RANK:240:SIZE], batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
        single.fit(X[:240], Y[:240], batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    trained = whole_values(model.weights)
    assert relative_difference(trained, [in_order[(*each,)].numpy() for each in paths]) < 1e-10
    with whole_tables(model):
        if RANK == 0:
            model.save(folder / "grouped.keras")
    if RANK == 0:
        loaded = on_one_rank(lambda: keras.models.load_model(folder / "grouped.keras", compile=False))
        assert all(map(np.array_equal, values(loaded.weights), trained))
        kinds = [type(each) for each in loaded.get_layer("group").tables]
        assert SIZE == 1 or kinds == [layers.Embedding, layers.Embedding, ShardedEmbedding, *[layers.Embedding] * 2]


def test_a_group_exchanges_rows_together_and_names_the_table_of_an_unknown_id(monkeypatch):
    exchanges, exchange = [], COLLECTIVES.exchange_parts
    monkeypatch.setattr(
        COLLECTIVES, "exchange_parts", lambda *given: exchanges.append(given[2]) or exchange(*given), raising=False
    )
    tables = {name: ShardedEmbedding(rows, WIDTH, name=name) for name, rows in (("b", ROWS), ("a", 9))}
    group = EmbeddingGroup(tables)
    group.build()
    ids = {"a": tf.range(RANK), "b": tf.constant([[ROWS - 1], [0]])}  # rank 0 asks for nothing of one
    with tf.GradientTape() as tape:
        rows = group(ids)
        total = tf.reduce_sum(rows["a"]) + tf.reduce_sum(rows["b"])
    tape.gradient(total, [each.value for each in group.trainable_variables])
    assert SIZE == 1 or [each.rpartition("_")[2] for each in exchanges] == ["ids", "rows", "gradients"]
    assert rows["a"].shape == (RANK, WIDTH)
    table = whole_values(tables["b"].weights)[0]
    assert np.array_equal(rows["b"], table[[[ROWS - 1], [0]]])
    ids["a"] = tf.constant([9 if RANK == SIZE - 1 else 8])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: 9 in a on rank {SIZE - 1}"):
        group(ids)
    with pytest.raises(UsageError, match=r"a dict of ids for \['a', 'b'\]. Received: <class 'list'>"):
        group([ids["a"], ids["b"]])


def test_messages_between_hosts_keep_their_shape(monkeypatch):
    """Horovod knows messages of the same shape; rows are the same, on one host and on several."""
    sent, send = [], COLLECTIVES._operations.alltoall
    monkeypatch.setattr(COLLECTIVES._operations, "alltoall", lambda *given: sent.append(given[0].shape) or send(*given))
    monkeypatch.setattr(type(COLLECTIVES), "cross_size", 2)
    for count in (40, 44, 0, 60):
        own = tf.range(100.0 * RANK, 100.0 * RANK + SIZE * count)[:, tf.newaxis]
        rows, numbers = COLLECTIVES.exchange_parts(own, tf.fill([SIZE], count), "shapes")
        expected = [100.0 * rank + count * RANK + np.arange(count) for rank in range(SIZE)]
        assert np.array_equal(rows, np.reshape(expected, [-1, 1]))
        assert np.array_equal(numbers, [count] * SIZE)
    assert [each[0] for each in sent] == [45 * SIZE] * 3 + [SIZE * 60 * 9 // 8]


@pytest.mark.skipif(SIZE == 1, reason="one rank sends nothing")
@pytest.mark.parametrize("bucket_bytes", [step_reduction.BUCKET_BYTES, 0])
def test_small_gradients_are_sent_after_those_of_tables(bucket_bytes, monkeypatch):
    monkeypatch.setattr(step_reduction, "BUCKET_BYTES", bucket_bytes)
    model = compiled(keras.optimizers.SGD(0.1))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss()(y, model(x, training=True))
        model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    operations = step.get_concrete_function(tf.constant(X[:4]), tf.constant(Y[:4])).graph.get_operations()
    (of_rows,) = [each for each in operations if each.type == "HorovodAlltoall" and each.name.endswith("_gradients")]
    reductions = [each for each in operations if "hvdtrain_gradients" in each.name or each.type == "HorovodAllreduce"]
    assert reductions
    assert {of_rows in ancestors(each) for each in reductions} == {bucket_bytes > 0}


def ancestors(operation):
    found, waiting = set(), [operation]
    while waiting:
        each = waiting.pop()
        before = [*(tensor.op for tensor in each.inputs), *each.control_inputs]
        waiting += [one for one in before if one not in found]
        found.update(before)
    return found
