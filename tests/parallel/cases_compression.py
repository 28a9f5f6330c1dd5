"""On all ranks: compressed reductions against a NumPy reference, and in steps of training."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainings import (
    COLLECTIVES,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    assert_equal_replicas,
    dtype_policy,
    equal_on_all_ranks,
    trained,
)

import hvdtrain
from hvdtrain.distributed.compressed_reduction import make_reducer
from hvdtrain.distributed.compression import Compressed, Compression
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.power_sgd import matrix_shape
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import compression_memories, gradient_bytes
from hvdtrain.optim.pipeline import in_scope, require_pipeline

SHAPES = [(3, 3, 8, 24), (40,), (32, 48), (4, 4), (64, 30)]
COMPRESSED = [0, 2, 4]
NUM_STEPS = 8


def own_gradients(step: int, rank: int, dtype="float32") -> list[np.ndarray]:
    """Two parts: what all ranks have in common, of rank 6, and noise."""
    common, noise = np.random.default_rng(step), np.random.default_rng((step, rank))
    found = []
    for shape in SHAPES:
        each = 0.1 * noise.normal(size=shape)
        if len(shape) > 1:
            n, m = matrix_shape(shape)
            each += (common.normal(size=(n, 6)) @ common.normal(size=(6, m))).reshape(shape)
        found.append(each.astype(dtype))
    return found


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    q = np.array(p)
    for i in range(q.shape[1]):
        for j in range(i):
            q[:, i] -= (q[:, j] @ q[:, i]) * q[:, j]
        q[:, i] /= np.linalg.norm(q[:, i])
    return q


class PowerSGDReference:
    """Algorithms 1 and 2 of Vogels et al., arXiv:1905.13727, in double precision, on all ranks' gradients."""

    def __init__(self, shapes, rank: int, first_q: list[np.ndarray]):
        self.shapes, self.q = [matrix_shape(shape) for shape in shapes], [np.array(q, np.float64) for q in first_q]
        self.errors = [[np.zeros(shape) for shape in self.shapes] for _ in range(SIZE)]

    def step(self, gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Takes the gradients of each rank; returns the updates."""
        updates = []
        for i, shape in enumerate(self.shapes):
            m = [gradients[r][i].reshape(shape).astype(np.float64) + self.errors[r][i] for r in range(SIZE)]
            basis = gram_schmidt(np.mean([each @ self.q[i] for each in m], axis=0))
            own = [each.T @ basis for each in m]
            self.q[i] = np.mean(own, axis=0)
            for r in range(SIZE):
                self.errors[r][i] = m[r] - basis @ own[r].T
            updates.append(basis @ self.q[i].T)
        return updates


def reducer_of(compression, *, op="average", keeps_errors=True):
    reducer = make_reducer(
        COLLECTIVES, ReductionConfig(op=op), make_compression(compression), keeps_errors=keeps_errors
    )
    run = tf.function(lambda gradients: reducer(gradients).gradients, autograph=False, reduce_retracing=True)
    return reducer, lambda own: [each.numpy() for each in run([tf.constant(each) for each in own])]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-10)])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_power_sgd_is_the_algorithm_of_the_paper(dtype, tolerance, op):
    compression = hvdtrain.PowerSGD(rank=3)
    reducer, reduce = reducer_of(compression, op=op)
    specs = [tf.TensorSpec(SHAPES[i], dtype) for i in COMPRESSED]
    reference = PowerSGDReference([SHAPES[i] for i in COMPRESSED], 3, list(compression.initial_state(specs).values()))
    factor = SIZE if op == "sum" else 1
    for step in range(NUM_STEPS):
        everyone = [own_gradients(step, rank, dtype) for rank in range(SIZE)]
        found = reduce(everyone[RANK])
        expected = reference.step([[each[i] for i in COMPRESSED] for each in everyone])
        for i, update in zip(COMPRESSED, expected, strict=True):
            assert relative_difference([found[i].ravel()], [factor * update.ravel()]) < tolerance
        for i in set(range(len(SHAPES))) - set(COMPRESSED):
            mean = np.mean([each[i] for each in everyone], axis=0)
            assert relative_difference([found[i]], [factor * mean]) < 1e-6
        own = [error.numpy() for error in reducer.memory.errors]
        for error, wanted in zip(own, reference.errors[RANK], strict=True):
            assert relative_difference([error.ravel()], [wanted.ravel()]) < 10 * tolerance
    assert equal_on_all_ranks(found)


def test_fp16_is_a_mean_in_half_precision_with_error_feedback():
    reducer, reduce = reducer_of("fp16")
    errors = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(SIZE)]
    for step in range(NUM_STEPS):
        everyone = [own_gradients(step, rank) for rank in range(SIZE)]
        found = reduce(everyone[RANK])
        for i in range(len(SHAPES)):
            sent = [everyone[r][i] + errors[r][i] for r in range(SIZE)]
            halves = [(each / np.float32(SIZE)).astype(np.float16) for each in sent]
            for r in range(SIZE):
                errors[r][i] = sent[r] - SIZE * halves[r].astype(np.float32)
            total = np.sum(halves, axis=0, dtype=np.float16).astype(np.float32)
            # With more than two ranks, the order of the sum is that of the ring.
            assert relative_difference([found[i]], [total]) < (1e-6 if SIZE == 2 else 1e-3)
            assert np.array_equal(reducer.memory.errors[i].numpy(), errors[RANK][i])


@pytest.mark.parametrize(("compression", "scale"), [("fp16", 1e-7), ("powersgd:2", 1)])
def test_what_compression_leaves_out_arrives_later(compression, scale):
    """Half precision rounds such small values to a few different ones."""
    own, steps = [each * np.float32(scale) for each in own_gradients(0, RANK)], 30
    means = [np.mean(each, axis=0) for each in zip(*COLLECTIVES.allgather(own), strict=True)]
    distances = []
    for keeps_errors in (True, False):
        _, reduce = reducer_of(compression, keeps_errors=keeps_errors)
        totals = [np.zeros(shape, np.float64) for shape in SHAPES]
        for _ in range(steps):
            totals = [total + each for total, each in zip(totals, reduce(own), strict=True)]
        distances.append(relative_difference(totals, [steps * mean.astype(np.float64) for mean in means]))
    assert distances[0] < distances[1] / 4


def test_half_precision_does_not_overflow_and_keeps_small_values():
    own = np.array([60_000.0, -1e6, 1e-9, 1.0], np.float32)
    reducer, reduce = reducer_of("fp16")
    (found,) = reduce([own])
    assert np.isfinite(found).all()
    total = found.astype(np.float64)
    for _ in range(39):
        total += reduce([own])[0]
    missing = np.mean(COLLECTIVES.allgather(reducer.memory.errors[0].numpy()), axis=0)
    assert total + missing == pytest.approx(40 * own.astype(np.float64), rel=1e-3)


@pytest.mark.parametrize("compression", ["fp16", "powersgd:2"])
@pytest.mark.parametrize("where", ["whole", "compressed"])
def test_a_gradient_that_is_not_finite_changes_no_memory(compression, where):
    reducer, reduce = reducer_of(compression)
    reduce(own_gradients(0, RANK))
    before = [each.numpy() for each in reducer.memory.variables().values()]
    bad = own_gradients(1, RANK)
    if RANK == SIZE - 1:
        bad[1 if where == "whole" else 2].flat[3] = np.inf
    found = reduce(bad)
    assert not all(np.isfinite(each).all() for each in found)
    assert all(map(np.array_equal, before, [each.numpy() for each in reducer.memory.variables().values()]))
    assert all(np.isfinite(each).all() for each in reduce(own_gradients(1, RANK)))


def test_the_first_steps_are_sent_whole():
    _, reduce = reducer_of(hvdtrain.PowerSGD(rank=2, start_after=2))
    for step in range(4):
        own = own_gradients(step, RANK)
        means = [np.mean(each, axis=0) for each in zip(*COLLECTIVES.allgather(own), strict=True)]
        assert (relative_difference(reduce(own), means) < 1e-6) == (step < 2)


def test_other_gradients_than_before_are_refused():
    reducer = make_reducer(COLLECTIVES, ReductionConfig(), hvdtrain.PowerSGD())
    gradients = [tf.constant(each) for each in own_gradients(0, RANK)]
    reducer(gradients)
    with pytest.raises(UsageError, match="the same gradients in every step"):
        reducer(gradients[2:])


def wide_model() -> keras.Model:
    """Two kernels are compressed; dropout and BatchNormalization have states of their own."""
    return keras.Sequential(
        [
            layers.Input((X.shape[1],)),
            layers.Dense(48, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(48, "tanh"),
            layers.Dropout(0.2),
            layers.Dense(NUM_CLASSES),
        ]
    )


def powersgd(optimizer: keras.optimizers.Optimizer, **options) -> keras.optimizers.Optimizer:
    return hvdtrain.DistributedOptimizer(optimizer, compression=hvdtrain.PowerSGD(rank=2, **options))


OPTIMIZERS = {
    "momentum": (lambda: powersgd(keras.optimizers.SGD(0.05, momentum=0.9)), {}),
    "later, accumulation, clipping, EMA": (
        lambda: powersgd(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True),
            start_after=3,
        ),
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
    ),
    "skipping, fp16": (
        lambda: hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), compression="fp16"),
        {"on_nan": "skip"},
    ),
}


OFTEN = "later, accumulation, clipping, EMA"


@pytest.mark.parametrize(
    "name", [name if name == OFTEN else pytest.param(name, marks=pytest.mark.long) for name in OPTIMIZERS]
)
def test_stopped_and_resumed_equals_uninterrupted(name, folder, watch):
    optimizer, options = OPTIMIZERS[name]
    uninterrupted = make_run(optimizer, make_model=wide_model, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    calls = 5 // options.get("steps_per_execution", 1)
    stopped(
        make_run(optimizer, folder, make_model=wide_model, callbacks=[StopAt(watch, calls)], job_watch=watch, **options)
    )
    resumed = make_run(optimizer, folder, make_model=wide_model, **options)
    assert_same_results(results_of(resumed, resumed.fit()), end)
    (memory,), (uninterrupted_memory,) = compression_memories(resumed.model), compression_memories(uninterrupted.model)
    kept = [each.numpy() for each in memory.variables().values()]
    assert any(each.any() for each in kept)
    assert all(map(np.array_equal, kept, [each.numpy() for each in uninterrupted_memory.variables().values()]))
    assert_equal_replicas(resumed.model)


def test_local_sgd_begins_with_what_was_not_sent():
    variable = keras.Variable(np.zeros((64, 48), np.float32))
    optimizer = powersgd(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    optimizer.apply([tf.constant(np.random.default_rng(RANK).normal(size=(64, 48)).astype(np.float32))], [variable])
    pipeline = require_pipeline(optimizer)
    error, before = pipeline.reduce.memory.errors[0].numpy(), variable.numpy()
    assert np.linalg.norm(error) > np.linalg.norm(before) > 0
    alone = dataclasses.replace(pipeline, reduce=pipeline.reduce.over(SingleProcessCollectives(RANK)))
    with in_scope([(optimizer, alone)]):
        for _ in range(2):
            optimizer.apply([tf.zeros((64, 48))], [variable])
    assert variable.numpy() == pytest.approx(before - error, abs=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)])
def test_mixed_precision(policy):
    with dtype_policy(policy):
        optimizer = keras.optimizers.SGD(0.05)
        if policy == "mixed_float16":  # so large that the first steps overflow
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**24, dynamic_growth_steps=4)
        model, summary = trained(wide_model, powersgd(optimizer))
    assert_equal_replicas(model)
    assert np.isfinite(summary["loss"])
    assert all(np.isfinite(each.numpy()).all() for each in compression_memories(model)[0].errors)


def test_the_summary_counts_bytes_and_the_error():
    compressed, summary = trained(wide_model, powersgd(keras.optimizers.SGD(0.05)))
    several, _ = trained(wide_model, powersgd(keras.optimizers.SGD(0.05)), steps_per_execution=4)
    assert all(map(np.array_equal, values(compressed.weights), values(several.weights)))
    assert 0 < summary["compression_error"] < 1
    assert summary["bytes_reduced"] == STEPS * 4 * num_sent(compressed, rank=2)
    whole, other = trained(wide_model, keras.optimizers.SGD(0.05))
    assert other["compression_error"] is None
    assert other["bytes_reduced"] == STEPS * 4 * sum(each.numpy().size for each in whole.trainable_weights)


def num_sent(model: keras.Model, rank: int) -> int:
    sizes = [(each.numpy().size, sum(each.shape) * rank) for each in model.trainable_weights]
    is_matrix = [len(each.shape) == 2 for each in model.trainable_weights]
    return sum(low if two and 2 * low <= full else full for (full, low), two in zip(sizes, is_matrix, strict=True))


def test_an_update_later_than_start_after_sends_less():
    optimizer = powersgd(keras.optimizers.SGD(0.05), start_after=10)
    model, summary = trained(wide_model, optimizer)
    full = sum(each.numpy().size for each in model.trainable_weights)
    assert summary["bytes_reduced"] == 4 * (10 * full + (STEPS - 10) * num_sent(model, rank=2))
    assert gradient_bytes(optimizer, 3) == 3 * 4 * full


def test_model_fit_and_embeddings():
    """A sparse gradient is sent whole."""
    model = keras.Sequential([layers.Input((6,), dtype="int32"), layers.Embedding(40, 32), layers.Flatten()])
    model.add(layers.Dense(64, "tanh"))
    model.add(layers.Dense(NUM_CLASSES))
    model.compile(powersgd(keras.optimizers.Adam(0.01)), loss())
    hvdtrain.broadcast(model)
    x = (np.abs(X) * 10).astype(np.int32) % 40
    history = model.fit(x[RANK::SIZE][:96], Y[RANK::SIZE][:96], epochs=4, batch_size=16, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert_equal_replicas(model)
    assert [tuple(each.shape) for each in compression_memories(model)[0].errors] == [(192, 64)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryOther(Compression):
    """A compression of a user's own: the even or the odd elements."""

    def num_bytes(self, gradient):
        return gradient.shape.num_elements() * 2

    def initial_state(self, gradients):
        return {"first": np.zeros((), np.int64)}

    def reduce(self, gradients, state, ranks):
        masks = [
            tf.reshape(tf.cast((tf.range(tf.size(each), dtype=tf.int64) + state["first"]) % 2, each.dtype), each.shape)
            for each in gradients
        ]
        own = [each * mask for each, mask in zip(gradients, masks, strict=True)]
        return Compressed(ranks.mean(own), own, {"first": 1 - state["first"]})


def test_a_compression_of_the_users_own():
    reducer, reduce = reducer_of(EveryOther())
    own = own_gradients(0, RANK)
    means = [np.mean(each, axis=0) for each in zip(*COLLECTIVES.allgather(own), strict=True)]
    first, second = reduce(own), reduce(own)
    assert relative_difference([a + b / 2 for a, b in zip(first, second, strict=True)], means) < 1e-6
    assert int(reducer.memory.shared["first"].numpy()) == 0


def test_a_tape_compresses_without_state():
    with hvdtrain.DistributedGradientTape(compression="fp16") as tape:
        x = tf.Variable([1.0 + RANK, 3.0])
        y = tf.reduce_sum(x**2)
    assert tape.gradient(y, x).numpy() == pytest.approx([1.0 + SIZE, 6.0], rel=1e-3)
    with pytest.raises(UsageError, match="none or fp16"):
        hvdtrain.DistributedGradientTape(compression="powersgd:4")
