"""On all ranks: a sharded optimizer makes the updates of one process, and keeps 1/N of the state."""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, dense_model, loss, relative_difference, samples, values
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    X,
    Y,
    alone,
    batchnorm_model,
    dtype_policy,
    equal_on_all_ranks,
    regularized_model,
    tanh_model,
    trained,
)

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime, shards
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.distributed.shards import Part, part_of, whole_of_arrays, whole_of_rows, whole_shape, whole_variables
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import NonFiniteError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.loss_scaling import overflowed_steps
from hvdtrain.optim.pipeline import in_scope, require_pipeline

TOLERANCE = 1e-6


def sharded(optimizer, **options):
    return hvdtrain.DistributedOptimizer(optimizer, shard_optimizer=True, **options)


def whole_state(optimizer) -> list[np.ndarray]:
    """The float variables of an optimizer, joined from the parts of all ranks."""
    variables = [variable for variable in optimizer.variables if "float" in variable.dtype]
    everyone = COLLECTIVES.allgather(values(variables))
    return [
        own[i] if part_of(v) is None else whole_of_arrays([each[i] for each in everyone], whole_shape(v))
        for i, v in enumerate(variables)
        for own in (everyone[RANK],)
    ]


def assert_equal_replicas(model: keras.Model) -> None:
    assert equal_on_all_ranks(values([*model.weights, *whole_variables(optimizer_variables(model))]))


OPTIMIZERS = {
    "SGD": lambda **o: keras.optimizers.SGD(0.05, **o),
    "momentum": lambda **o: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **o),
    "RMSprop": lambda **o: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True, **o),
    "Adagrad": lambda **o: keras.optimizers.Adagrad(0.05, **o),
    "Adadelta": lambda **o: keras.optimizers.Adadelta(1.0, **o),
    "Adam": lambda **o: keras.optimizers.Adam(0.01, amsgrad=True, **o),
    "AdamW": lambda **o: keras.optimizers.AdamW(0.01, weight_decay=0.1, **o),
    "Adamax": lambda **o: keras.optimizers.Adamax(0.01, **o),
    "Nadam": lambda **o: keras.optimizers.Nadam(0.01, **o),
    "Lion": lambda **o: keras.optimizers.Lion(0.001, **o),
    "Ftrl": lambda **o: keras.optimizers.Ftrl(0.05, **o),
}
CLIPPED = [{}, {"clipnorm": 0.02}, {"global_clipnorm": 0.05}, {"clipvalue": 0.01}]


def one_step(model, optimizer, x, y) -> None:
    with tf.GradientTape() as tape:
        value = loss()(y, model(x))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)


QUICK = ("momentum", "Adam", "Nadam", "Ftrl")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in OPTIMIZERS]
)
def test_every_elementwise_optimizer_makes_the_updates_of_one_process(name):
    """In single and double precision, with and without clipping and EMA; the state is that of one process too."""
    clipped = CLIPPED[list(OPTIMIZERS).index(name) % len(CLIPPED)]
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12)):
        options = {**clipped, "use_ema": True, "ema_momentum": 0.5} if dtype == "float64" else {}
        with dtype_policy(dtype):
            ours, single = dense_model(), dense_model()
            optimizer, plain = sharded(OPTIMIZERS[name](**options)), OPTIMIZERS[name](**options)
            for i in range(4):
                x, y = samples(8 * SIZE, seed=i)
                one_step(ours, optimizer, x[RANK::SIZE], y[RANK::SIZE])
                one_step(single, plain, x, y)
        assert relative_difference(values(ours.weights), values(single.weights)) < tolerance
        plain_state = [v.numpy() for v in plain.variables if "float" in v.dtype]
        state = whole_state(optimizer)
        assert [each.shape for each in state] == [each.shape for each in plain_state]
        assert relative_difference(state, plain_state) < 20 * tolerance
        assert equal_on_all_ranks(values(ours.weights))


def adamw(**options):
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, **options)


def excluding():
    optimizer = adamw()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def constrained_model() -> keras.Model:
    constraint = keras.constraints.MaxNorm(0.5)
    dense = layers.Dense(16, "tanh", kernel_constraint=constraint)
    return keras.Sequential([layers.Input((6,)), dense, layers.Dense(NUM_CLASSES)])


# A model, its optimizer, the options of DistributedOptimizer, and those of the trainer.
TRAININGS = {
    "accumulation, clipping, EMA, several steps per execution": (
        tanh_model,
        lambda: adamw(global_clipnorm=0.05, use_ema=True, ema_momentum=0.9),
        {"groups": 1},
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3, "histograms_every": 4},
    ),
    "normalization, an EMA that overwrites weights, skipping": (
        batchnorm_model,
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5),
        {},
        {"sync_batchnorm": True, "on_nan": "skip"},
    ),
    "excluded from weight decay, regularization, unequal shares": (
        regularized_model,
        excluding,
        {},
        {"on_nan": "ignore", "shares": ",".join(str(1 + rank % 2) for rank in range(SIZE))},
    ),
    "constraints, unreadable samples": (
        constrained_model,
        lambda: keras.optimizers.Nadam(0.01, clipnorm=0.02),
        {},
        {"bad_samples": 1},
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_are_those_of_one_process(name):
    make_model, optimizer, reduction, options = TRAININGS[name]
    accumulation = {name: options[name] for name in options if name == "gradient_accumulation_steps"}
    ours = optimizer()
    ours.gradient_accumulation_steps = accumulation.get("gradient_accumulation_steps")
    model, _ = trained(make_model, sharded(ours, **reduction), **options)
    single = alone(make_model, optimizer())
    assert relative_difference(values(model.weights), values(single.weights)) < TOLERANCE
    assert_equal_replicas(model)


def test_updates_are_exactly_those_of_the_plain_optimizer_on_two_ranks():
    """Two addends have one sum, in whatever order."""
    models = [trained(tanh_model, make(adamw()))[0] for make in (sharded, hvdtrain.DistributedOptimizer)]
    found = [values(model.weights) for model in models]
    if SIZE == 2:
        assert all(map(np.array_equal, *found))
    assert relative_difference(*found) < TOLERANCE


def test_each_rank_keeps_its_share_of_the_state():
    """Of a wide model; parts are padded to a multiple of 32 elements."""
    model = keras.Sequential([layers.Input((512,)), layers.Dense(1024), layers.Dense(333)])
    optimizer = sharded(keras.optimizers.Adam(use_ema=True))
    optimizer.build(model.trainable_variables)
    plain = keras.optimizers.Adam(use_ema=True)
    plain.build(model.trainable_variables)
    sizes = [sum(each.numpy().nbytes for each in one.variables) for one in (optimizer, plain)]
    assert sizes[0] < 1.05 * sizes[1] / SIZE
    names = [[v.path.partition("/")[2] for v in one.variables] for one in (optimizer, plain)]
    assert names[0] == names[1]


SHAPES = [(3, 5), (), (520 * SIZE, 1013), (1,), (33,)]  # one of them has a bucket of its own


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("piece_elements", [1 << 30, 1 << 16])
def test_parts_of_reduced_gradients_are_those_of_the_mean(dtype, piece_elements, monkeypatch):
    monkeypatch.setattr(shards, "PIECE_ELEMENTS", piece_elements)
    own = [np.random.default_rng((RANK, i)).normal(size=shape) for i, shape in enumerate(SHAPES)]
    own = [tf.cast(each, dtype) for each in own]
    everyone = COLLECTIVES.allgather([np.asarray(tf.cast(each, tf.float64)) for each in own])
    tolerance = {"float32": 1e-6, "float64": 1e-15}.get(dtype, 1e-2)
    for op, factor in (("average", 1 / SIZE), ("sum", 1.0)):
        reduction = ShardedReduction(COLLECTIVES, ReductionConfig(op=op))

        @tf.function(autograph=False)
        def reduce(gradients, reduction=reduction):
            reduced = reduction(gradients)
            (norm,) = reduced.sum_over_ranks(
                [tf.add_n([tf.nn.l2_loss(tf.cast(b, tf.float32)) for b in reduced.buckets])]
            )
            return reduced.gradients, reduced.gather(reduced.gradients), reduced.unpack(reduced.sent), norm

        parts, wholes, sent, norm = reduce(own)
        expected = [factor * np.sum(each, axis=0) for each in zip(*everyone, strict=True)]
        wide = [np.asarray(tf.cast(each, tf.float64)) for each in wholes]
        assert relative_difference(wide, expected) < tolerance
        for part, whole, mine, gradient in zip(parts, wholes, sent, own, strict=True):
            of_rank = Part(tuple(whole.shape), RANK, SIZE)
            assert tf.reduce_all(part == of_rank.of(whole))
            assert tf.reduce_all(
                (mine if mine.shape == gradient.shape else whole_of_rows(mine, gradient.shape)) == gradient
            )
        assert float(norm) == pytest.approx(sum(np.sum(each**2) / 2 for each in expected), rel=max(tolerance, 1e-6))


def test_samples_that_are_left_out_do_not_count():
    ours, single = dense_model(), dense_model()
    optimizer, plain = sharded(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)
    pipeline, weight = require_pipeline(optimizer), tf.constant(0.25 if RANK == 0 else 1.0)
    weighted = dataclasses.replace(pipeline.reduce, step_weight=lambda: weight)
    x, y = samples(8 * SIZE)
    with in_scope([(optimizer, dataclasses.replace(pipeline, reduce=weighted))]):
        one_step(ours, optimizer, x[RANK::SIZE], y[RANK::SIZE])
    plain.learning_rate = 0.1 / np.mean([0.25, *[1.0] * (SIZE - 1)])
    one_step(single, plain, x, y)
    assert relative_difference(values(ours.weights), values(single.weights)) < TOLERANCE


def test_all_ranks_find_a_gradient_that_is_not_finite_in_the_part_of_one():
    """Only rank 0 has the first elements; it must not be alone in leaving the step out."""
    x = np.array(X)
    x[40] = np.nan
    model, summary = trained(tanh_model, sharded(adamw()), Arrays(x, Y), on_nan="skip")
    assert all(np.isfinite(each).all() for each in values(model.weights))
    assert_equal_replicas(model)
    assert summary["steps"] == 24
    with pytest.raises(NonFiniteError, match=r"the loss on rank \d is not finite"):
        trained(tanh_model, sharded(adamw()), Arrays(x, Y))


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long)])
def test_mixed_precision(policy):
    with dtype_policy(policy):
        optimizers = [keras.optimizers.Adam(0.01) for _ in range(2)]
        if policy == "mixed_float16":  # so large that the first steps overflow
            optimizers = [
                keras.optimizers.LossScaleOptimizer(each, initial_scale=2.0**24, dynamic_growth_steps=4)
                for each in optimizers
            ]
        model, _ = trained(tanh_model, sharded(optimizers[0]))
        plain, _ = trained(tanh_model, hvdtrain.DistributedOptimizer(optimizers[1]))
    if policy == "mixed_float16":
        skipped = [overflowed_steps(each.optimizer, 24) for each in (model, plain)]
        assert 0 < skipped[0] == skipped[1] < 24
    assert relative_difference(values(model.weights), values(plain.weights)) < TOLERANCE
    assert_equal_replicas(model)


def embedding_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((6,), dtype="int32"), layers.Embedding(40, 9), layers.Flatten()])
    model.add(layers.Dense(NUM_CLASSES))
    return model


def test_model_fit_and_embeddings(folder):
    """Also: the EMA is left in the model, and the saved model loads without its optimizer's state."""
    adam = lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, clipvalue=0.01)
    x = (np.abs(X) * 10).astype(np.int32)[: 16 * SIZE * 6] % 40
    y = Y[: len(x)]
    model, single = embedding_model(), embedding_model()
    model.compile(sharded(adam()), loss())
    hvdtrain.broadcast(model)
    callbacks = hvdtrain.callbacks.distributed()
    model.fit(x[RANK::SIZE], y[RANK::SIZE], epochs=2, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
    # Keras alone would clip each occurrence of a row by itself.
    dense = {"sparse_as_dense": True, "collectives": SingleProcessCollectives()}
    single.compile(hvdtrain.DistributedOptimizer(adam(), **dense), loss())
    single.fit(x, y, epochs=2, batch_size=16 * SIZE, shuffle=False, verbose=0)
    assert relative_difference(values(model.weights), values(single.weights)) < TOLERANCE
    assert_equal_replicas(model)
    if RANK == 0:
        model.save(folder / "model.keras")
        with warnings.catch_warnings(record=True):
            loaded = keras.models.load_model(folder / "model.keras")
        assert all(map(np.array_equal, values(loaded.weights), values(model.weights)))
        loaded.fit(x[:16], y[:16], verbose=0)


def test_values_that_others_assign_are_kept():
    model = dense_model()
    optimizer = sharded(keras.optimizers.SGD(0.1))
    x, y = samples(8)
    one_step(model, optimizer, x, y)
    zeros = [np.zeros_like(each) for each in values(model.weights)]
    model.set_weights(zeros)
    one_step(model, optimizer, x, y)
    single = dense_model()
    single.set_weights(zeros)
    one_step(single, keras.optimizers.SGD(0.1), x, y)
    assert relative_difference(values(model.weights), values(single.weights)) < TOLERANCE


RESUMED = {
    "Adam, EMA": (lambda: sharded(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)), {}),
    "accumulation": (
        lambda: sharded(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5)),
        {"gradient_accumulation_steps": 2, "steps_per_execution": 3},
    ),
}


@pytest.mark.parametrize("name", ["Adam, EMA", pytest.param("accumulation", marks=pytest.mark.long)])
def test_stopped_and_resumed_equals_uninterrupted(name, folder, watch):
    optimizer, options = RESUMED[name]
    uninterrupted = make_run(optimizer, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    calls = 5 // options.get("steps_per_execution", 1)
    stopped(make_run(optimizer, folder, callbacks=[StopAt(watch, calls)], job_watch=watch, **options))
    resumed = make_run(optimizer, folder, weights=300 + RANK, **options)
    assert_same_results(results_of(resumed, resumed.fit()), end)


def adam():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)


def smooth(optimizer, folder=None, **options):
    return make_run(optimizer, folder, make_model=tanh_model, source=Arrays(X, Y), **options)


def float_values(optimizer) -> list[np.ndarray]:
    return [variable.numpy() for variable in optimizer.variables if "float" in variable.dtype]


@pytest.mark.long
def test_resumes_with_and_without_sharding_and_on_another_number_of_ranks(folder):
    """A run is stopped after each of four stages: sharded, not sharded, sharded again, and on one rank."""
    uninterrupted = smooth(adam)
    uninterrupted.fit()
    run, before, started = folder / "run", None, []
    for last_call, is_sharded in ((5, True), (3, False), (2, True)):
        with JobWatch(COLLECTIVES) as own:
            seed = 100 if before is None else RANK
            options = {"callbacks": [StopAt(own, last_call)], "job_watch": own, "weights": seed}
            stage = smooth((lambda: sharded(adam())) if is_sharded else adam, run, **options)
            with pytest.raises(StoppedEarly):
                stage.fit(on_start=lambda restored, stage=stage: started.append(whole_state(stage.model.optimizer)))
        assert before is None or all(map(np.array_equal, started[-1], before))
        before = whole_state(stage.model.optimizer)
    step = stage.step
    if RANK == 0:
        with pytest.MonkeyPatch.context() as patch:
            single = runtime.Runtime(runtime.current().topology, SingleProcessCollectives())
            patch.setattr(runtime, "_runtime", single)
            with JobWatch(SingleProcessCollectives()) as own:
                options = {"callbacks": [StopAt(own, 2, rank=0)], "job_watch": own, "batch": GLOBAL_BATCH}
                # On one rank, there is nothing to shard.
                one = smooth(lambda: sharded(adam()), run, **options)
                with pytest.raises(StoppedEarly):
                    one.fit(on_start=lambda restored: started.append(float_values(one.model.optimizer)))
        assert all(map(np.array_equal, started[-1], before))
        before = float_values(one.model.optimizer)
    before = COLLECTIVES.allgather(before)[0]
    keras.utils.clear_session()  # rank 0 has created more models, and Keras numbers them
    resumed = smooth(lambda: sharded(adam()), run, weights=300 + RANK)
    summary = resumed.fit(on_start=lambda restored: started.append(whole_state(resumed.model.optimizer)))
    assert all(map(np.array_equal, started[-1], before))
    assert summary["resumed_from"] > step
    assert relative_difference(values(resumed.model.weights), values(uninterrupted.model.weights)) < 1e-5


def test_a_checkpoint_is_loaded_without_sharding(folder):
    """As by another program: the model and its optimizer's state, on ranks that do not shard it."""
    trained_run = smooth(lambda: sharded(adam()), folder, steps=5)
    trained_run.fit()
    state = whole_state(trained_run.model.optimizer)
    model = smooth(adam).model
    model.optimizer.build(model.trainable_variables)
    hvdtrain.Checkpointer(folder, model).load()
    assert all(map(np.array_equal, float_values(model.optimizer), state))


REFUSED = [
    (lambda: keras.optimizers.Lamb(), {}, "update each element of a variable by itself.*Received: Lamb"),
    (lambda: keras.optimizers.Muon(), {}, "Received: Muon"),
    (lambda: keras.optimizers.Adafactor(), {}, "Received: Adafactor"),
    (lambda: type("Own", (keras.optimizers.SGD,), {})(), {}, "Received: Own"),
    (adamw, {"compression": "fp16"}, "compression"),
    (adamw, {"op": "adasum"}, "adasum"),
]


@pytest.mark.parametrize(("optimizer", "options", "message"), REFUSED)
def test_what_cannot_be_sharded_is_refused(optimizer, options, message):
    with pytest.raises(UsageError, match=message):
        sharded(optimizer(), **options)


def test_other_refusals():
    built = adamw()
    built.build(dense_model().trainable_variables)
    with pytest.raises(UsageError, match="before it is built"):
        sharded(built)
    with pytest.raises(UsageError, match="local_layers"):
        hvdtrain.PartialDistributedOptimizer(adamw(), local_layers=[], shard_optimizer=True)
    with pytest.raises(UsageError, match=r"groups must be at most .*99 for 4"):
        one_step(dense_model(), sharded(adamw(), groups=99), *samples(8))
    for options in ({"mode": "local"}, {"mode": "local", "sync_steps_first": 2}, {"quorum": 1}):
        with pytest.raises(UsageError, match=r"excludes shard_optimizer=True"):
            trained(tanh_model, sharded(adamw()), **options)


def test_the_callback_that_swaps_weights_and_their_ema():
    model = tanh_model()
    model.compile(sharded(adam()), loss())
    hvdtrain.broadcast(model)
    callbacks = hvdtrain.callbacks.distributed([keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    with pytest.raises(UsageError, match="SwapEMAWeights"):
        model.fit(X[:16], Y[:16], verbose=0, callbacks=callbacks)
