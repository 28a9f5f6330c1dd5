"""Models with sharded tables, and those of one process to compare them with."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers
from models import NUM_CLASSES, loss, values
from trainers import make_trainer
from trainings import COLLECTIVES, SIZE, dtype_policy

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.distributed.row_shards import whole_of_rows
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.layers import ShardedEmbedding

ROWS, WIDTH, IDS = 53, 6, 5
GLOBAL_BATCH = 24
# 245 samples: the last batch cannot be divided equally among ranks.
_RNG = np.random.default_rng(4)
X = (_RNG.zipf(1.3, size=(245, IDS)).clip(1, ROWS) - 1).astype(np.int32)
Y = _RNG.integers(0, NUM_CLASSES, 245).astype(np.int32)


@contextlib.contextmanager
def float64():
    with dtype_policy("float64"):
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        try:
            yield
        finally:
            keras.config.set_floatx(before)


def make_model(kind=ShardedEmbedding, seed=7, **options) -> keras.Model:
    keras.utils.set_random_seed(seed)
    ids = keras.Input((IDS,), dtype="int32")
    table = kind(
        ROWS, WIDTH, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.5), name="table", **options
    )
    hidden = layers.Flatten()(table(ids))
    hidden = layers.Dense(8, activation="tanh")(hidden)
    return keras.Model(ids, layers.Dense(NUM_CLASSES)(hidden))


def whole_values(variables) -> list[np.ndarray]:
    """The values of variables, tables joined from the rows of all ranks; on every rank."""
    everyone = COLLECTIVES.allgather(values(variables))
    return [
        everyone[0][i]
        if (shard := row_shard_of(v)) is None
        else whole_of_rows([each[i] for each in everyone], shard.shape[0])
        for i, v in enumerate(variables)
    ]


def compiled(optimizer, **options) -> keras.Model:
    model = make_model(**options)
    model.compile(hvdtrain.DistributedOptimizer(optimizer), loss())
    hvdtrain.broadcast(model)
    return model


def plain(optimizer, weights, kind=layers.Embedding, **options) -> keras.Model:
    """The model of one process; duplicates are summed before they are clipped or squared."""
    model = make_model(kind, **options)
    model.set_weights(weights)
    model.compile(hvdtrain.DistributedOptimizer(optimizer, collectives=SingleProcessCollectives()), loss())
    return model


def trainer_of(model, folder=None, *, optimizer=None, watch=None, source=None, **options):
    model.compile(optimizer or keras.optimizers.Adam(0.02), loss(), metrics=["accuracy"])
    checkpointer = None if folder is None else hvdtrain.Checkpointer(folder, model)
    arguments = {"steps": 14, "seed": 5, "batch_size": GLOBAL_BATCH // SIZE, "log_every": 5, **options}
    return make_trainer(
        model, source or Arrays(X, Y), Arrays(X[:99], Y[:99]), checkpointer=checkpointer, job_watch=watch, **arguments
    )


def on_one_rank(make):
    """A trainer of a single process on each rank, which holds whole tables."""
    with pytest.MonkeyPatch.context() as patch:
        single = runtime.Runtime(runtime.current().topology, SingleProcessCollectives())
        patch.setattr(runtime, "_runtime", single)
        return make()


def pooled_model(kind, **options) -> keras.Model:
    keras.utils.set_random_seed(3)
    ids = keras.Input((IDS,), dtype="int32")
    return keras.Model(ids, layers.Dense(NUM_CLASSES)(kind(ROWS, WIDTH, name="table", **options)(ids)))


class Pooled(layers.Embedding):
    """For comparison: in Keras' own operations."""

    def __init__(self, *arguments, combiner, padding_id=None, **named):
        super().__init__(*arguments, **named)
        self.combiner, self.padding_id = combiner, padding_id

    def call(self, ids):
        kept = keras.ops.cast(ids != self.padding_id, self.compute_dtype)[..., None]
        total = keras.ops.sum(super().call(keras.ops.maximum(ids, 0)) * kept, -2)
        return total if self.combiner == "sum" else total / keras.ops.maximum(keras.ops.sum(kept, -2), 1)

    def compute_output_spec(self, ids):
        return keras.KerasTensor((*ids.shape[:-1], self.output_dim), self.compute_dtype)
