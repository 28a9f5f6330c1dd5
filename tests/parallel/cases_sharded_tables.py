"""On all ranks: a model with sharded tables trains as one process does with keras.layers.Embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from sharded_models import (
    GLOBAL_BATCH,
    IDS,
    ROWS,
    WIDTH,
    Pooled,
    X,
    Y,
    compiled,
    float64,
    make_model,
    on_one_rank,
    plain,
    pooled_model,
    trainer_of,
    whole_values,
)
from trainers import make_trainer
from trainings import COLLECTIVES, RANK, SIZE, dtype_policy

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed.replica_consistency import weights_sha256
from hvdtrain.distributed.row_shards import write_rows
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DataError, DivergenceError, NonFiniteError, UnequalError, UsageError
from hvdtrain.layers import EmbeddingGroup, ShardedEmbedding
from hvdtrain.optim.pipeline import pipeline_of
from hvdtrain.training.equality import step_check

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


@pytest.mark.long  # cases_table_checkpoints.py compares a run that resumes with one that does not
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


def test_all_ranks_learn_of_rows_of_one_rank_that_are_not_finite():
    """Even if no other gradient shows it."""
    model = compiled(keras.optimizers.SGD(0.1))
    variables = model.trainable_variables
    gradients = [
        tf.zeros_like(each.value)
        if row_shard_of(each) is None
        else tf.IndexedSlices(tf.fill([1, WIDTH], np.nan if RANK == 0 else 1.0), tf.constant([0]), each.shape)
        for each in variables
    ]
    reduced = pipeline_of(model.optimizer).reduce(variables, gradients)
    assert not np.isfinite(reduced.total([tf.nn.l2_loss(each) for each in reduced.buckets]))


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
