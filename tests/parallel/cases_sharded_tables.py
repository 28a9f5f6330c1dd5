"""On all ranks: a model with sharded tables trains as one process does with keras.layers.Embedding."""

import contextlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from stopped_runs import StopAt
from trainers import make_trainer
from trainings import COLLECTIVES, RANK, SIZE, dtype_policy

import hvdtrain
from hvdtrain.checkpoint import model_state
from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.data import Arrays
from hvdtrain.distributed import replica_consistency, row_shards, runtime
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.replica_consistency import weights_sha256
from hvdtrain.distributed.row_shards import RowShard, whole_of_rows, write_rows
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.snapshot import host_array
from hvdtrain.errors import DataError, DivergenceError, NonFiniteError, StoppedEarly, UnequalError, UsageError
from hvdtrain.layers import EmbeddingGroup, ShardedEmbedding, whole_tables
from hvdtrain.training.equality import step_check

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


OPTIMIZERS = {
    "SGD": lambda **o: keras.optimizers.SGD(0.5, **o),
    "momentum": lambda **o: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True, **o),
    "Adagrad": lambda **o: keras.optimizers.Adagrad(0.1, **o),
    "Adam": lambda **o: keras.optimizers.Adam(0.02, amsgrad=True, **o),
    "Ftrl": lambda **o: keras.optimizers.Ftrl(0.1, **o),
}
OPTIONS = [
    {},
    {"global_clipnorm": 0.05, "weight_decay": 0.01},
    {},
    {"use_ema": True, "ema_momentum": 0.5, "clipvalue": 0.01},
    {"clipnorm": 0.02},
]


QUICK = ("momentum", "Adagrad", "Adam")


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in OPTIMIZERS]
)
def test_model_fit_is_that_of_one_process(name):
    """Weights and the state of the optimizer, in double precision."""
    options = OPTIONS[list(OPTIMIZERS).index(name)]
    with float64():
        model = compiled(OPTIMIZERS[name](**options))
        single = plain(OPTIMIZERS[name](**options), whole_values(model.weights))
        x, y = X[:240], Y[:240]
        model.fit(x[RANK::SIZE], y[RANK::SIZE], batch_size=GLOBAL_BATCH // SIZE, epochs=2, shuffle=False, verbose=0)
        single.fit(x, y, batch_size=GLOBAL_BATCH, epochs=2, shuffle=False, verbose=0)
        state, expected = (
            whole_values([v for v in each.optimizer.variables if "float" in v.dtype]) for each in (model, single)
        )
    assert relative_difference(whole_values(model.weights), values(single.weights)) < 1e-10
    assert relative_difference(state, expected) < 1e-10


def test_batches_of_different_sizes_and_empty_ones_in_a_loop():
    """Also: ids that no other rank asks for, and the gradient tape."""
    with float64():
        model, optimizer = make_model(), keras.optimizers.SGD(0.5)
        single, other = make_model(layers.Embedding), keras.optimizers.SGD(0.5)
        single.set_weights(whole_values(model.weights))
        for step in range(3):
            x, y = X[step * 16 : step * 16 + 16], Y[step * 16 : step * 16 + 16]
            own = slice(0, 0) if RANK == 0 and SIZE > 1 else slice(RANK, None, max(1, SIZE - 1))
            own = own if SIZE == 1 or RANK == 0 else slice(RANK - 1, None, SIZE - 1)
            with hvdtrain.DistributedGradientTape(op="sum") as tape:
                value = keras.ops.sum(keras.losses.sparse_categorical_crossentropy(y[own], model(x[own]), True))
            # TensorFlow's variables, as some loops pass them.
            variables = [each.value for each in model.trainable_variables]
            optimizer.apply(tape.gradient(value, variables), variables)
            with tf.GradientTape() as tape:
                value = keras.ops.sum(keras.losses.sparse_categorical_crossentropy(y, single(x), True))
            other.apply(tape.gradient(value, single.trainable_variables), single.trainable_variables)
    assert relative_difference(whole_values(model.weights), values(single.weights)) < 1e-10


class OwnStep(keras.Model):
    """A train_step that does not pass its loss to the optimizer: gradients are weighted instead."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, variables), variables)
        return {"loss": value}


@pytest.mark.parametrize("has_own_step", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_with_batches_of_different_sizes(has_own_step):
    """Each rank's contribution to the gradient of a row counts by its own number of samples."""
    sizes = [2 + 3 * rank for rank in range(SIZE)]
    starts, total = np.cumsum([0, *sizes]), sum(sizes)
    num_steps = 4

    def batches(pick):
        parts = [pick(step * total) for step in range(num_steps)]
        return tf.data.Dataset.from_generator(
            lambda: ((X[part], Y[part]) for part in parts),
            output_signature=(tf.TensorSpec([None, IDS], tf.int32), tf.TensorSpec([None], tf.int32)),
        )

    def made(kind):
        model = make_model(kind)
        return OwnStep(model.inputs, model.outputs) if has_own_step else model

    with float64():
        model, single = made(ShardedEmbedding), made(layers.Embedding)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), loss())
        hvdtrain.broadcast(model)
        single.set_weights(whole_values(model.weights))
        alone = hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1), collectives=SingleProcessCollectives())
        single.compile(alone, loss())
        model.fit(batches(lambda first: slice(first + starts[RANK], first + starts[RANK + 1])), verbose=0)
        single.fit(batches(lambda first: slice(first, first + total)), verbose=0)
    assert relative_difference(whole_values(model.weights), values(single.weights)) < 1e-10


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"steps_per_execution": 3, "gradient_accumulation_steps": 2}, marks=pytest.mark.long),
    ],
    ids=["uneven batches, EMA", "accumulation, EMA"],
)
def test_trainer_is_that_of_one_process(options):
    """Uneven last batches too; the digest of weights is that of the whole table, on any number of ranks."""
    accumulation = options.get("gradient_accumulation_steps", 1)
    make = lambda: keras.optimizers.Adam(
        0.02,
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.8,
        gradient_accumulation_steps=options.get("gradient_accumulation_steps"),
    )
    batch = GLOBAL_BATCH // SIZE // accumulation
    trainer = trainer_of(make_model(), optimizer=make(), **{**options, "batch_size": batch})
    start = weights_sha256(trainer.model)
    summary = trainer.fit()

    def alone():
        single = trainer_of(make_model(), optimizer=make(), **{**options, "batch_size": batch * SIZE})
        assert weights_sha256(single.model) == start
        return single, single.fit()

    single, expected = on_one_rank(alone)
    assert relative_difference(whole_values(trainer.model.weights), values(single.model.weights)) < 1e-4
    # That of all rows, on every rank.
    assert trainer.parts.record.norm() == pytest.approx(single.parts.record.norm(), rel=1e-3)
    assert summary["eval"]["loss"] == pytest.approx(expected["eval"]["loss"], rel=1e-4)
    assert summary["eval"]["accuracy"] == pytest.approx(expected["eval"]["accuracy"], abs=0.02)
    assert len(set(COLLECTIVES.allgather(summary["weights_sha256"]))) == 1


def test_runs_are_bit_identical():
    digests = [trainer_of(make_model()).fit()["weights_sha256"] for _ in range(2)]
    assert digests[0] == digests[1]


def test_initial_rows_do_not_depend_on_the_ranks():
    model = make_model()
    single = on_one_rank(make_model)
    assert all(map(np.array_equal, whole_values(model.weights), values(single.weights)))
    table = whole_values(model.weights)[0]
    assert abs(table.mean()) < 0.1
    assert 0.3 < table.std() < 0.7
    assert SIZE == 1 or len(values(model.weights)[0]) == -(-ROWS // SIZE)


@pytest.mark.parametrize(
    "initializer", ["uniform", "glorot_uniform", "he_normal", "zeros", keras.initializers.TruncatedNormal(seed=3)]
)
def test_initializers_are_distributed_as_in_keras(initializer):
    layer, other = ShardedEmbedding(4096, 8, initializer), layers.Embedding(4096, 8, initializer)
    layer.build()
    other.build()
    own = whole_values(layer.weights)[0]
    if initializer != "zeros":
        assert own.std() == pytest.approx(other.weights[0].numpy().std(), rel=0.05)
        assert len(np.unique(own)) > 0.98 * own.size
    assert np.all(np.isfinite(own))


def test_seeds_of_ranks_become_equal():
    if SIZE == 1:
        return
    model = make_model(seed=100 + RANK)
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss())
    for layer in model.layers[2:]:
        layer.set_weights([np.ones_like(each) for each in layer.get_weights()])
    with pytest.raises(DivergenceError, match="drawn from one seed"):
        model.fit(X[:8], Y[:8], verbose=0)
    hvdtrain.broadcast(model)
    expected = on_one_rank(lambda: make_model(seed=100))
    assert np.array_equal(whole_values(model.weights)[0], values(expected.weights)[0])


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


@pytest.mark.parametrize("options", [{"combiner": "sum", "padding_id": -1}, {"combiner": "mean", "padding_id": 0}])
def test_multi_hot_ids(options):
    """Dense ids, some of them padding; a sample may have none."""
    x = X[:240].copy()
    x[::3, 2:] = options["padding_id"]
    x[::7] = options["padding_id"]
    with float64():
        model = pooled_model(ShardedEmbedding, **options)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), loss())
        hvdtrain.broadcast(model)
        single = pooled_model(Pooled, **options)
        single.set_weights(whole_values(model.weights))
        single.compile(
            hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1), collectives=SingleProcessCollectives()), loss()
        )
        model.fit(x[RANK::SIZE], Y[RANK:240:SIZE], batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
        single.fit(x, Y[:240], batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    assert relative_difference(whole_values(model.weights), values(single.weights)) < 1e-10


def test_ragged_ids_and_masks():
    layer = ShardedEmbedding(ROWS, WIDTH, mask_zero=True)
    mean = ShardedEmbedding(ROWS, WIDTH, combiner="mean")
    dense = tf.constant([[1, 0], [RANK, 3]])
    rows, mask = layer(dense), layer.compute_mask(dense)
    table = whole_values(layer.weights)[0]
    assert np.array_equal(rows, table[dense.numpy()])
    assert np.array_equal(mask, dense != 0)
    ragged = tf.ragged.constant([[1, 2, 2], [], [RANK, ROWS - 1]], dtype=tf.int32)
    assert np.array_equal(layer(ragged).flat_values, table[ragged.flat_values.numpy()])
    pooled = mean(ragged)
    table = whole_values(mean.weights)[0]
    expected = [table[[1, 2, 2]].mean(0), np.zeros(WIDTH), table[[RANK, ROWS - 1]].mean(0)]
    assert np.allclose(pooled, expected, atol=1e-6)


def test_one_table_looked_up_twice_in_a_step():
    def make(kind):
        keras.utils.set_random_seed(3)
        ids, table = keras.Input((IDS,), dtype="int32"), kind(ROWS, WIDTH, name="table")
        both = layers.concatenate([layers.Flatten()(table(ids[:, :2])), layers.Flatten()(table(ids[:, 1:]))])
        return keras.Model(ids, layers.Dense(NUM_CLASSES)(both))

    with float64():
        model, single = make(ShardedEmbedding), make(layers.Embedding)
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1)), loss())
        hvdtrain.broadcast(model)
        single.set_weights(whole_values(model.weights))
        single.compile(
            hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1), collectives=SingleProcessCollectives()), loss()
        )
        model.fit(X[RANK:240:SIZE], Y[RANK:240:SIZE], batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
        single.fit(X[:240], Y[:240], batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    assert relative_difference(whole_values(model.weights), values(single.weights)) < 1e-10


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


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)])
def test_mixed_precision(policy):
    with dtype_policy(policy):
        model = compiled(keras.optimizers.Adam(0.01))
        single = plain(keras.optimizers.Adam(0.01), whole_values(model.weights))
        model.fit(X[RANK:240:SIZE], Y[RANK:240:SIZE], batch_size=GLOBAL_BATCH // SIZE, shuffle=False, verbose=0)
        single.fit(X[:240], Y[:240], batch_size=GLOBAL_BATCH, shuffle=False, verbose=0)
    assert model.layers[1].compute_dtype == policy.removeprefix("mixed_")
    tolerance = 0.02 if policy == "mixed_float16" else 0.1
    assert relative_difference(whole_values(model.weights), values(single.weights)) < tolerance


@pytest.mark.parametrize("bad", [ROWS + 5, pytest.param(-1, marks=pytest.mark.long)])
def test_an_id_that_is_out_of_range(bad):
    """Only the last rank has one; all ranks raise, with the id."""
    x = X[:48].copy()
    if RANK == SIZE - 1:
        x[-1, 3] = bad
    found = rf"from 0 to {ROWS - 1}. Received: {bad} in table on rank {SIZE - 1 if SIZE > 1 else 0}"
    with pytest.raises(DataError, match=found):
        compiled(keras.optimizers.SGD(0.1)).fit(x, Y[:48], batch_size=48, verbose=0)
    every = np.array(COLLECTIVES.allgather(x)).reshape(-1, IDS)
    y = np.tile(Y[:48], SIZE)
    with pytest.raises(DataError, match=rf"Received: {bad} in table"):
        trainer_of(make_model(), source=Arrays(every, y), batch_size=48).fit()


def test_a_nan_is_found_on_every_rank():
    """The gradient of a row is on one rank only."""

    model = make_model()
    trainer = trainer_of(model)
    rows = model.layers[1].weights[0]
    if RANK == 0:
        rows.value.scatter_update(tf.IndexedSlices(tf.fill([1, WIDTH], np.nan), tf.constant([0])))
    with pytest.raises(NonFiniteError):
        trainer.fit()


@pytest.mark.parametrize("bad_row", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_step_that_is_not_finite_is_skipped_by_the_ranks_of_all_rows(bad_row):
    """Either a row that one rank has is bad, or a sample of one rank: the others learn of it by gradients only."""
    part = GLOBAL_BATCH // SIZE
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(240)
    bad = order[2 * GLOBAL_BATCH + (SIZE - 1) * part]
    ids, labels = X[:240].copy(), Y[:240].astype(np.float32)
    ids[ids == ROWS - 1] = 0
    if bad_row:
        ids[bad, 0] = ROWS - 1
    else:
        labels[bad] = np.nan

    def squares(y_true, y_pred):
        return tf.reduce_sum(y_pred**2, -1) + 0 * tf.reshape(y_true, [-1])

    def run():
        model = make_model()
        model.compile(keras.optimizers.Adagrad(0.1), squares)
        shard = row_shard_of(model.layers[1].weights[0])
        if bad_row and (shard is None or (ROWS - 1) % SIZE == RANK):
            row = ROWS - 1 if shard is None else (ROWS - 1) // SIZE
            write_rows(model.layers[1].weights[0], row, np.full([1, WIDTH], np.nan, np.float32))
        batch = part if shard is not None or SIZE == 1 else GLOBAL_BATCH
        return model, make_trainer(
            model, Arrays(ids, labels), batch_size=batch, steps=8, seed=5, on_nan="skip", on_unequal="ignore"
        ).fit()

    model, summary = run()
    single, expected = on_one_rank(run)
    assert summary["skipped_steps"] == expected["skipped_steps"] == 1
    used = [each[:-1] if i == 0 else each for i, each in enumerate(whole_values(model.weights))]
    theirs = [each[:-1] if i == 0 else each for i, each in enumerate(values(single.weights))]
    assert all(np.isfinite(each).all() for each in used)
    assert relative_difference(used, theirs) < 1e-4


def test_compression_leaves_rows_as_they_are():
    """The gradients of other layers are compressed; rows travel in the dtype of the table."""
    model = make_model()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16"), loss())
    hvdtrain.broadcast(model)
    single = make_model(layers.Embedding)
    single.set_weights(whole_values(model.weights))
    single.compile(
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), collectives=SingleProcessCollectives()), loss()
    )
    model.fit(X[RANK:24:SIZE], Y[RANK:24:SIZE], batch_size=GLOBAL_BATCH // SIZE, verbose=0)
    single.fit(X[:24], Y[:24], batch_size=GLOBAL_BATCH, verbose=0)
    ours, theirs = whole_values(model.weights), values(single.weights)
    assert relative_difference(ours[:1], theirs[:1]) < 1e-6
    assert 0 < relative_difference(ours[1:], theirs[1:]) < 1e-2 or SIZE == 1


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


def test_evaluate_and_predict_on_uneven_shares():
    """Ranks with fewer batches answer the lookups of the others."""
    model = make_model()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss(), metrics=["accuracy"])
    hvdtrain.broadcast(model)
    single = make_model(layers.Embedding)
    single.set_weights(whole_values(model.weights))
    single.compile("sgd", loss(), metrics=["accuracy"])
    for count in (8 * SIZE + 1, 1):
        found = hvdtrain.evaluate(model, (X[:count], Y[:count]), batch_size=8)
        expected = single.evaluate(X[:count], Y[:count], verbose=0, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)
        predicted = hvdtrain.predict(model, X[:count], batch_size=8, on_all_ranks=True)
        assert np.allclose(predicted, single.predict(X[:count], verbose=0), atol=1e-5)


def test_the_check_of_a_step_covers_tables(monkeypatch):
    """A gradient that depends on the rank is found; one process and the ranks agree otherwise."""
    batch = tf.constant(X[RANK::SIZE][:24]), tf.constant(Y[RANK::SIZE][:24])

    def verified(optimizer, **options):
        model = compiled(optimizer)
        return hvdtrain.verify(lambda data: run_step(model, data, **options), batch, model)

    finding = verified(keras.optimizers.Adagrad(0.1, global_clipnorm=0.1))
    if SIZE == 1:
        return
    assert (finding.unequal, finding.unchecked, finding.compared["gradient"]) == (None, None, 5)
    with pytest.raises(UnequalError):
        verified(keras.optimizers.SGD(0.1), factor=float(RANK + 1))
    monkeypatch.setattr(step_check, "_MAX_TABLE_BYTES", 0)
    assert "would copy its sharded tables" in verified(keras.optimizers.SGD(0.1)).unchecked


def run_step(model, data, factor=1.0):
    x, y = data
    with tf.GradientTape() as tape:
        value = factor * loss()(y, model(x, training=True))
    model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return {}


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


REFUSED = [
    (lambda: ShardedEmbedding(9, 2, embeddings_regularizer="l2"), "embeddings_regularizer"),
    (lambda: ShardedEmbedding(9, 2, combiner="max"), "combiner must be"),
    (lambda: ShardedEmbedding(9, 2, padding_id=0), "padding_id needs"),
    (lambda: ShardedEmbedding(9, 2, combiner="sum", mask_zero=True), "mask_zero excludes"),
    (lambda: EmbeddingGroup([layers.Dense(3)]), "a group must consist of.*Dense"),
    (lambda: EmbeddingGroup({}), "Received: none"),
    (lambda: ShardedEmbedding(9, 2, "orthogonal"), "must draw each row by itself.*Orthogonal"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_arguments_that_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def fit_with(optimizer, callbacks=(), **options):
    model = make_model()
    model.compile(hvdtrain.DistributedOptimizer(optimizer, **options), loss())
    hvdtrain.broadcast(model)
    model.fit(X[:8], Y[:8], verbose=0, callbacks=[*callbacks])


def test_other_refusals():
    if SIZE == 1:
        return
    with pytest.raises(UsageError, match=r"update each element of a variable by itself.*Received: Lamb"):
        fit_with(keras.optimizers.Lamb())
    with pytest.raises(UsageError, match=r"sharded table.*excludes shard_optimizer"):
        fit_with(keras.optimizers.Adam(), shard_optimizer=True)
    for options in ({"mode": "local"}, {"quorum": 1}):
        with pytest.raises(UsageError, match="sharded table"):
            trainer_of(make_model(), **options)
    model = make_model()
    model.compile("sgd", loss())
    with pytest.raises(UsageError, match="must be distributed"):
        model.fit(X[:8], Y[:8], verbose=0)
    with pytest.raises(UsageError, match="callbacks that save the model"):
        fit_with(keras.optimizers.SGD(0.1), callbacks=[keras.callbacks.ModelCheckpoint("m.keras")])
    with pytest.raises(UsageError, match=r"is on . ranks. Received: a use of it as a whole"):
        model.layers[1].embeddings  # noqa: B018
