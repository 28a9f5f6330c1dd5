"""On all ranks: sharded tables are saved, restored on any number of ranks, and made plain."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import loss, values
from sharded_models import (
    GLOBAL_BATCH,
    ROWS,
    X,
    Y,
    compiled,
    make_model,
    on_one_rank,
    trainer_of,
    whole_values,
)
from stopped_runs import StopAt
from trainings import COLLECTIVES, RANK, SIZE

import hvdtrain
from hvdtrain.checkpoint import model_state
from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.distributed import replica_consistency, row_shards
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.row_shards import RowShard, whole_of_rows
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.snapshot import host_array
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.layers import ShardedEmbedding, whole_tables


def test_the_callback_saves_and_restores_rows(folder):
    def fitted(epochs, seed=7):
        model = make_model(seed=seed)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss())
        hvdtrain.broadcast(model)
        made = []
        callbacks = [
            hvdtrain.callbacks.Checkpoint(folder, every="epoch"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: made.append(epoch)),
        ]
        part = {"x": X[RANK:240:SIZE], "y": Y[RANK:240:SIZE], "batch_size": GLOBAL_BATCH // SIZE, "shuffle": False}
        history = model.fit(**part, epochs=epochs, verbose=0, callbacks=hvdtrain.callbacks.distributed(callbacks))
        return model, history.history["loss"], made

    fitted(2)
    keras.utils.clear_session()
    resumed, losses, made = fitted(4, seed=300 + RANK)
    assert made == [2, 3]
    shutil.rmtree(folder) if RANK == 0 else None
    COLLECTIVES.barrier()
    keras.utils.clear_session()
    uninterrupted, all_losses, _ = fitted(4)
    assert losses == all_losses
    ours, theirs = ([*each.weights, *optimizer_variables(each)] for each in (resumed, uninterrupted))
    assert all(map(np.array_equal, values(ours), values(theirs)))


def test_stopped_and_resumed_equals_uninterrupted(folder, watch, monkeypatch):
    """Rows are saved and restored in blocks; nothing reads a table, or a rank's part of it, as a whole."""
    monkeypatch.setattr(row_shards, "BLOCK_BYTES", 200)

    def host_array_of_replica(variable):
        assert row_shard_of(variable) is None, f"{variable.path} was read as a whole"
        return host_array(variable)

    def tensor_of_replicas(joined, name):
        assert SIZE == 1 or not joined.has_rows(name), f"{name} was read as a whole"
        return tensor(joined, name)

    tensor = JoinedParts.__getitem__
    monkeypatch.setattr(model_state, "host_array", host_array_of_replica)
    monkeypatch.setattr(replica_consistency, "host_array", host_array_of_replica)
    monkeypatch.setattr(JoinedParts, "__getitem__", tensor_of_replicas)
    adam = lambda: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9)
    uninterrupted = trainer_of(make_model(), optimizer=adam())
    end = uninterrupted.fit()
    run = trainer_of(make_model(), folder, optimizer=adam(), watch=watch, callbacks=[StopAt(watch, 5)])
    with pytest.raises(StoppedEarly):
        run.fit()
    resumed = trainer_of(make_model(seed=300 + RANK), folder, optimizer=adam())
    summary = resumed.fit()
    assert summary["resumed_from"] == run.step
    assert summary["weights_sha256"] == end["weights_sha256"]
    ours, theirs = (values(optimizer_variables(each.model)) for each in (resumed, uninterrupted))
    assert all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize("block_bytes", [1000, pytest.param(32 << 20, marks=pytest.mark.long)])
def test_resumes_on_one_rank_and_back(folder, block_bytes, monkeypatch):
    """State saved by all ranks is loaded by one process, continued, and loaded by all ranks."""
    monkeypatch.setattr(row_shards, "BLOCK_BYTES", block_bytes)
    run = trainer_of(make_model(), folder, steps=5)
    run.fit()
    saved = whole_values([*run.model.weights, *optimizer_variables(run.model)])
    if SIZE > 1:
        reader = hvdtrain.TableReader(folder)
        assert np.array_equal(reader.rows("table/embeddings", [[3, ROWS - 1]]), saved[0][[[3, ROWS - 1]]])
        assert np.array_equal(reader.shard("table/embeddings", RANK), run.model.weights[0].numpy())
        with pytest.raises(UsageError, match=f"Received: {ROWS}"):
            reader.rows("table/embeddings", [ROWS])

    def alone():
        model = make_model(seed=9)
        continued = trainer_of(model, folder, steps=8, batch_size=GLOBAL_BATCH)
        found = []
        continued.fit(on_start=lambda restored: found.extend(values([*model.weights, *optimizer_variables(model)])))
        return continued, found

    before = None
    if RANK == 0:
        continued, found = on_one_rank(alone)
        assert all(map(np.array_equal, found, saved))
        before = values([*continued.model.weights, *optimizer_variables(continued.model)])
    before = COLLECTIVES.allgather(before)[0]
    keras.utils.clear_session()  # rank 0 has created more models, and Keras numbers them
    found = []
    again = trainer_of(make_model(seed=300 + RANK), folder, steps=10)
    again.fit(
        on_start=lambda restored: found.extend(whole_values([*again.model.weights, *optimizer_variables(again.model)]))
    )
    assert all(map(np.array_equal, found, before))


def test_rows_travel_between_any_numbers_of_ranks():
    table = np.arange(53 * 3, dtype=np.float32).reshape(53, 3)
    for before in (1, 2, 3, 4, 7):
        shards = [np.asarray(RowShard((53, 3), rank, before).of(table)) for rank in range(before)]
        assert len({each.shape for each in shards}) == 1
        assert np.array_equal(whole_of_rows(shards, 53), table)


def test_a_saved_model_is_plain(folder):
    model = compiled(keras.optimizers.Adam(0.02))
    model.fit(X[RANK:96:SIZE], Y[RANK:96:SIZE], batch_size=GLOBAL_BATCH // SIZE, verbose=0)
    if SIZE > 1:
        with pytest.raises(UsageError, match="whole_tables"):
            model.save(folder / "own.keras")
    expected = whole_values(model.weights)
    with whole_tables(model):
        if RANK == 0:
            model.save(folder / "model.keras")
            model.export(folder / "exported", verbose=False)
    assert SIZE == 1 or isinstance(model.layers[1], ShardedEmbedding)
    model.fit(X[RANK:48:SIZE], Y[RANK:48:SIZE], batch_size=GLOBAL_BATCH // SIZE, verbose=0)
    if RANK == 0:
        loaded = keras.models.load_model(folder / "model.keras", compile=False)
        assert SIZE == 1 or type(loaded.layers[1]) is layers.Embedding
        assert all(map(np.array_equal, values(loaded.weights), expected))
        exported = tf.saved_model.load(str(folder / "exported"))
        assert np.allclose(exported.serve(X[:9]), loaded.predict(X[:9], verbose=0), atol=1e-5)
