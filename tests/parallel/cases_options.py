"""On all ranks: synchronous training with each option and data source makes the same updates as one process."""

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from keras import layers
from models import dense_model, relative_difference, values
from one_process import train_alone
from trainers import make_trainer
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
    weights_alone,
    write_records,
)

import hvdtrain
from hvdtrain.data import Arrays, Stream, TFRecords
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.errors import UsageError


def test_ranks_of_one_host_listen_on_loopback_only():
    listening = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert all(each.laddr.ip in ("127.0.0.1", "::1") for each in listening), listening


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
EMA = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.8}
TABLE = {
    "accumulation": (tanh_model, ADAM, {"learning_rate": 0.01}, {"gradient_accumulation_steps": 4}),
    "global norm": (tanh_model, SGD, {"learning_rate": 0.5, "global_clipnorm": 0.05}, {}),
    "clip by value": (tanh_model, SGD, {"learning_rate": 0.5, "clipvalue": 0.01}, {}),
    "weight decay": (tanh_model, SGD, {"learning_rate": 0.1, "weight_decay": 0.1}, {}),
    "regularizer": (regularized_model, SGD, {"learning_rate": 0.1}, {"gradient_accumulation_steps": 2}),
    "EMA": (tanh_model, SGD, EMA, {}),
    "EMA, accumulation": (
        tanh_model,
        SGD,
        EMA,
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
    ),
    "ten steps per execution": (
        tanh_model,
        ADAM,
        {"learning_rate": 0.01},
        {"steps_per_execution": 10, "log_every": 11},
    ),
    "groups": (tanh_model, ADAM, {"learning_rate": 0.01}, {"groups": 2}),
    "BatchNormalization": (batchnorm_model, SGD, {"learning_rate": 0.1}, {"sync_batchnorm": True}),
    "BatchNormalization, ten steps per execution": (
        batchnorm_model,
        ADAM,
        {"learning_rate": 0.01},
        {"sync_batchnorm": True, "steps_per_execution": 10},
    ),
}


OFTEN = ("regularizer", "global norm", "EMA, accumulation", "BatchNormalization, ten steps per execution")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in TABLE]
)
def test_equals_one_process(name):
    make_model, make_optimizer, options, training = TABLE[name]
    training = dict(training)
    accumulation = {name: value for name, value in training.items() if name == "gradient_accumulation_steps"}
    optimizer = make_optimizer(**options, **accumulation)
    if "groups" in training:
        optimizer = hvdtrain.DistributedOptimizer(optimizer, groups=training.pop("groups"))
    ours, summary = trained(make_model, optimizer, **training)
    assert summary["steps"] == STEPS
    assert relative_difference(values(ours.weights), weights_alone(make_model, make_optimizer, **options)) < 1e-5
    assert_equal_replicas(ours)


def test_tfrecords_equal_one_process(folder):
    source = TFRecords(write_records(folder), parse, cache_dir=folder / "cache")
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source, steps_per_execution=10)
    assert relative_difference(values(ours.weights), weights_alone(tanh_model, ADAM, learning_rate=0.01)) < 1e-5
    assert_equal_replicas(ours)


def test_a_dataset_equals_one_process():
    source = Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source)
    theirs = weights_alone(tanh_model, ADAM, learning_rate=0.01, shuffle=False)
    assert relative_difference(values(ours.weights), theirs) < 1e-5


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)])
def test_mixed_precision_keeps_replicas_equal(policy):
    with dtype_policy(policy):
        model, _ = trained(tanh_model, keras.optimizers.SGD(0.1))
        theirs = alone(tanh_model, keras.optimizers.SGD(0.1))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert_equal_replicas(model)
    assert relative_difference(values(model.weights), values(theirs.weights)) < 0.05


def adasum(gradients: list[np.ndarray]) -> np.ndarray:
    """Maleki et al., arXiv:2006.02924, equation 8: over pairs, then over pairs of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot = float((a * b).sum())
    return (1 - dot / (2 * float((a * a).sum()))) * a + (1 - dot / (2 * float((b * b).sum()))) * b


def test_adasum():
    rng = np.random.default_rng(RANK)
    own = [rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=7).astype(np.float32)]
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(op="adasum"))
    reduced = [each.numpy() for each in reduce([tf.constant(each) for each in own]).gradients]
    all_ranks = COLLECTIVES.allgather(own)
    for i, each in enumerate(reduced):
        assert each == pytest.approx(adasum([rank[i] for rank in all_ranks]), rel=1e-4, abs=1e-5)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), op="adasum")
    model, summary = trained(tanh_model, optimizer)
    assert_equal_replicas(model)
    assert np.isfinite(summary["loss"])


def test_compression_error_of_fp16():
    model, summary = trained(tanh_model, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16"))
    assert 1e-6 < summary["compression_error"] < 1e-2
    assert_equal_replicas(model)
    assert trained(tanh_model, keras.optimizers.SGD(0.1))[1]["compression_error"] is None


def test_synchronized_batchnorm_forward_and_backward():
    """Outputs and gradients of each rank's part equal those of the whole batch, also with uneven parts and masks."""
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


def test_a_rank_without_a_sample_has_no_weight_in_batchnorm():
    whole = np.random.default_rng(3).normal(3.0, 2.0, size=(SIZE * 5, 3)).astype(np.float32)
    layer = layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([layers.Input((3,)), layer])
    is_filler = RANK == 0 and SIZE > 1
    hvdtrain.synchronize_batch_normalization(model, sample_weight=lambda: tf.constant(0.0 if is_filler else 1.0))
    layer(tf.constant(whole[5 * RANK : 5 * RANK + 5]), training=True)
    counted = whole[5:] if SIZE > 1 else whole
    assert layer.moving_mean.numpy() == pytest.approx(0.5 * counted.mean(0), rel=1e-4)
    assert layer.moving_variance.numpy() == pytest.approx(0.5 + 0.5 * counted.var(0), rel=1e-4)


def test_fewer_samples_in_the_last_step_than_ranks():
    x, y = X[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)], Y[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)]
    ours, _ = trained(batchnorm_model, SGD(0.1), Arrays(x, y), sync_batchnorm=True)
    theirs = compiled(batchnorm_model, SGD(0.1), metrics=())
    train_alone(theirs, x, y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert_equal_replicas(ours)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


def test_losses_that_cannot_be_averaged_are_refused():
    model = dense_model()
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(optimizer="sgd", loss=summed)
    with pytest.raises(UsageError, match="op='sum'"):
        make_trainer(model, Arrays(X, Y), batch_size=4, steps=1)
    ours = compiled(tanh_model, "sgd", seed=100 + RANK)
    ours.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1e-3), op="sum"), loss=summed)
    make_trainer(ours, Arrays(X, Y), batch_size=GLOBAL_BATCH // SIZE, steps=STEPS, seed=5).fit()
    theirs = compiled(tanh_model, "sgd", metrics=())
    theirs.compile(optimizer=keras.optimizers.SGD(1e-3), loss=summed)
    train_alone(theirs, X, Y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
