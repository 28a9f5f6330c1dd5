"""On every rank: each option and source of synchronous training makes the updates of one process."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import dense_model, relative_difference, values
from one_process import train_alone
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    alone,
    assert_equal_replicas,
    batchnorm_model,
    compiled,
    dtype_policy,
    parse,
    regularized_model,
    tanh_model,
    trained,
    write_records,
)

import hvdtrain
from hvdtrain.data import Arrays, Stream, TFRecords
from hvdtrain.errors import UsageError

SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
AVERAGE = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.8}
TABLE = {
    "accumulation": (tanh_model, ADAM, {"learning_rate": 0.01}, {"accumulate": 4}),
    "global norm": (tanh_model, SGD, {"learning_rate": 0.5, "global_clipnorm": 0.05}, {}),
    "clip by value": (tanh_model, SGD, {"learning_rate": 0.5, "clipvalue": 0.01}, {}),
    "weight decay": (tanh_model, SGD, {"learning_rate": 0.1, "weight_decay": 0.1}, {}),
    "regularizer": (regularized_model, SGD, {"learning_rate": 0.1}, {"accumulate": 2}),
    "average of weights": (tanh_model, SGD, AVERAGE, {}),
    "average of weights, accumulation": (tanh_model, SGD, AVERAGE, {"accumulate": 2, "steps_per_call": 3}),
    "ten steps a call": (tanh_model, ADAM, {"learning_rate": 0.01}, {"steps_per_call": 10, "log_every": 11}),
    "groups": (tanh_model, ADAM, {"learning_rate": 0.01}, {"groups": 2}),
    "BatchNormalization": (batchnorm_model, SGD, {"learning_rate": 0.1}, {"sync_batchnorm": True}),
    "BatchNormalization, ten steps a call": (
        batchnorm_model,
        ADAM,
        {"learning_rate": 0.01},
        {"sync_batchnorm": True, "steps_per_call": 10},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_equals_one_process(name):
    make_model, make_optimizer, options, training = TABLE[name]
    training = dict(training)
    accumulate = {"gradient_accumulation_steps": training["accumulate"]} if "accumulate" in training else {}
    optimizer = make_optimizer(**options, **accumulate)
    if "groups" in training:
        optimizer = hvdtrain.DistributedOptimizer(optimizer, groups=training.pop("groups"))
    ours, summary = trained(make_model, optimizer, **training)
    theirs = alone(make_model, make_optimizer(**options))
    assert summary["steps"] == STEPS
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
    assert_equal_replicas(ours)


@pytest.fixture
def shared_folder(tmp_path):
    return Path(COLLECTIVES.allgather(str(tmp_path))[0])


def test_tfrecords_equal_one_process(shared_folder):
    source = TFRecords(write_records(shared_folder), parse, cache_dir=shared_folder / "cache")
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source, steps_per_call=10)
    theirs = alone(tanh_model, keras.optimizers.Adam(0.01))
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
    assert_equal_replicas(ours)


def test_a_data_set_equals_one_process():
    source = Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source)
    theirs = alone(tanh_model, keras.optimizers.Adam(0.01), shuffle=False)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_keeps_replicas_equal(policy):
    with dtype_policy(policy):
        model, _ = trained(tanh_model, keras.optimizers.SGD(0.1))
        theirs = alone(tanh_model, keras.optimizers.SGD(0.1))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert_equal_replicas(model)
    assert relative_difference(values(model.weights), values(theirs.weights)) < 0.05


def adasum(gradients: list[np.ndarray]) -> np.ndarray:
    """Maleki et al., arXiv:2006.02924, equation 8, over pairs, then pairs of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot = float((a * b).sum())
    return (1 - dot / (2 * float((a * a).sum()))) * a + (1 - dot / (2 * float((b * b).sum()))) * b


def test_adasum():
    rng = np.random.default_rng(RANK)
    own = [rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=7).astype(np.float32)]
    reduce = COLLECTIVES.gradient_reducer(name="a", op="adasum", compression="none", groups=None, sparse_as_dense=False)
    reduced = [each.numpy() for each in reduce([tf.constant(each) for each in own]).gradients]
    everyone = COLLECTIVES.allgather(own)
    for i, each in enumerate(reduced):
        assert each == pytest.approx(adasum([rank[i] for rank in everyone]), rel=1e-4, abs=1e-5)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), op="adasum")
    model, summary = trained(tanh_model, optimizer)
    assert_equal_replicas(model)
    assert np.isfinite(summary["loss"])


def test_what_fp16_loses_is_shown():
    model, summary = trained(tanh_model, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16"))
    assert 1e-6 < summary["compression_error"] < 1e-2
    assert_equal_replicas(model)
    assert trained(tanh_model, keras.optimizers.SGD(0.1))[1]["compression_error"] is None


def test_synchronised_batchnorm_forward_and_backward():
    """Outputs and gradients on each rank's part are those of the whole batch, uneven parts and masks included."""
    rng = np.random.default_rng(3)
    whole = rng.normal(3.0, 2.0, size=(SIZE * 5 + 1, 4, 3)).astype(np.float32)
    mask = rng.random((len(whole), 4)) > 0.3
    upstream = rng.normal(size=whole.shape).astype(np.float32)
    cuts = [0, *(5 * (rank + 1) for rank in range(SIZE - 1)), len(whole)]
    mine = slice(cuts[RANK], cuts[RANK + 1])

    def make():
        layer = layers.BatchNormalization(momentum=0.5, synchronized=True)
        return layer, keras.Sequential([layers.Input((4, 3)), layer])

    def run(layer, part, kept):
        x = tf.constant(whole[part])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=None if kept is None else kept[part])
            total = tf.reduce_sum(y * upstream[part])
        return y.numpy(), tape.gradient(total, x).numpy()

    for kept in (None, mask):
        layer, model = make()
        assert hvdtrain.synchronize_batch_normalization(model) == 1
        plain_layer, _ = make()
        y, gradient = run(layer, mine, kept)
        expected_y, expected_gradient = run(plain_layer, slice(None), kept)
        assert y == pytest.approx(expected_y[mine], abs=2e-5)
        assert gradient == pytest.approx(expected_gradient[mine], abs=2e-5)
        assert layer.moving_mean.numpy() == pytest.approx(plain_layer.moving_mean.numpy(), abs=1e-5)
        assert layer.moving_variance.numpy() == pytest.approx(plain_layer.moving_variance.numpy(), abs=1e-5)


def test_a_rank_without_a_sample_of_its_own_counts_for_nothing_in_batchnorm():
    whole = np.random.default_rng(3).normal(3.0, 2.0, size=(SIZE * 5, 3)).astype(np.float32)
    layer = layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([layers.Input((3,)), layer])
    is_filler = RANK == 0 and SIZE > 1
    hvdtrain.synchronize_batch_normalization(model, part_weight=lambda: tf.constant(0.0 if is_filler else 1.0))
    layer(tf.constant(whole[5 * RANK : 5 * RANK + 5]), training=True)
    counted = whole[5:] if SIZE > 1 else whole
    assert layer.moving_mean.numpy() == pytest.approx(0.5 * counted.mean(0), rel=1e-4)
    assert layer.moving_variance.numpy() == pytest.approx(0.5 + 0.5 * counted.var(0), rel=1e-4)


def test_fewer_samples_in_the_last_step_than_ranks():
    x, y = X[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)], Y[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)]
    ours, _ = trained(batchnorm_model, SGD(0.1), Arrays(x, y), sync_batchnorm=True)
    theirs = compiled(batchnorm_model, SGD(0.1))
    train_alone(theirs, x, y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert_equal_replicas(ours)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


def test_losses_that_cannot_be_averaged_are_refused():
    model = dense_model()
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(optimizer="sgd", loss=summed)
    with pytest.raises(UsageError, match="op='sum'"):
        hvdtrain.Trainer(model, Arrays(X, Y), batch_size=4, steps=1)
    ours = compiled(tanh_model, "sgd", seed=100 + RANK)
    ours.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1e-3), op="sum"), loss=summed)
    hvdtrain.Trainer(ours, Arrays(X, Y), batch_size=GLOBAL_BATCH // SIZE, steps=STEPS, seed=5).fit()
    theirs = compiled(tanh_model, "sgd")
    theirs.compile(optimizer=keras.optimizers.SGD(1e-3), loss=summed)
    train_alone(theirs, X, Y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
