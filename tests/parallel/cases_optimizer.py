"""On all ranks: gradients are averaged on Keras 3, and clipping, decay and EMA use the averaged gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, relative_difference, samples, values
from one_process import train_alone
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.system import devices

TOPOLOGY = hvdtrain.init(gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH = 8


def own_slice(array, step: int):
    """This rank's part of a step's global batch."""
    first = (step * SIZE + RANK) * BATCH
    return array[first : first + BATCH]


def global_batch(array, step: int):
    return array[step * SIZE * BATCH : (step + 1) * SIZE * BATCH]


def step(model: keras.Model, optimizer, x, y, loss_fn) -> None:
    with tf.GradientTape() as tape:
        value = loss_fn(y, model(x, training=True))
    optimizer.apply_gradients(
        zip(tape.gradient(value, model.trainable_variables), model.trainable_variables, strict=True)
    )


def differ(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def assert_equal_on_all_ranks(arrays: list[np.ndarray]) -> None:
    for rank, theirs in enumerate(COLLECTIVES.allgather(arrays)):
        for i, (mine, other) in enumerate(zip(arrays, theirs, strict=True)):
            assert np.array_equal(mine, other), f"array {i} differs between rank {RANK} and rank {rank}"


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum_decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.001),
    "adamw_clip": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "static_loss_scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "dynamic_loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    # Its members exist only after the optimizer is built.
    OPTIMIZERS["multi"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.Adam(0.01, global_clipnorm=0.01)}
        )
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_process_on_the_whole_batch(name):
    x, y = samples(3 * SIZE * BATCH)
    ours, alone = dense_model(), dense_model()
    initial = values(ours.weights)
    optimizer, plain = hvdtrain.DistributedOptimizer(OPTIMIZERS[name]()), OPTIMIZERS[name]()
    for number in range(3):
        for model, each, cut in ((ours, optimizer, own_slice), (alone, plain, global_batch)):
            batch_x, batch_y = cut(x, number), cut(y, number)
            with tf.GradientTape() as tape:
                value = each.scale_loss(loss()(batch_y, model(batch_x)))
            gradients = tape.gradient(value, model.trainable_variables)
            each.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert all(not np.array_equal(a, b) for a, b in zip(initial, values(ours.weights), strict=True))
    assert_equal_on_all_ranks(values(ours.weights) + values(optimizer.variables))
    assert relative_difference(values(ours.weights), values(alone.weights)) < 1e-5
    floats = [v for v in zip(optimizer.variables, plain.variables, strict=True) if "float" in v[0].dtype]
    assert relative_difference([a.numpy() for a, _ in floats], [b.numpy() for _, b in floats]) < 1e-4


def shipped_optimizers() -> list[str]:
    bases = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    members = vars(keras.optimizers).items()
    return sorted(
        name
        for name, member in members
        if isinstance(member, type) and issubclass(member, keras.optimizers.Optimizer) and name not in bases
    )


OFTEN = ("AdamW", "Muon")


# On more ranks only some: what all optimizers share.
@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.long)
        for name in (shipped_optimizers() if SIZE <= 2 else ["Adam", "SGD"])
    ],
)
def test_every_shipped_optimizer_in_fit(name):
    """Each rank trains on its own samples; without averaging the replicas would diverge after one step."""
    x, y = samples(64, seed=RANK)
    make = getattr(keras.optimizers, name)
    alone = dense_model()
    try:
        make().apply([tf.ones(v.shape) for v in alone.trainable_variables], alone.trainable_variables)
    except AttributeError as error:
        pytest.skip(f"Keras {keras.__version__}'s own {name} fails on TensorFlow: {error}")
    model = dense_model()
    model.compile(optimizer=hvdtrain.DistributedOptimizer(make()), loss=loss())
    before = values(model.weights)
    model.fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)
    assert differ(before, values(model.weights))
    assert_equal_on_all_ranks(values(model.weights) + values(model.optimizer.variables))


def test_tower_average_equals_ring_average():
    """In-graph towers, as in TensorFlow 1: one for each rank's batch, their gradients averaged by hand."""
    x, y = samples(SIZE * BATCH)
    towers, ours = dense_model(), dense_model()
    initial = values(ours.weights)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def tower_gradients():
        per_tower = []
        for tower in range(SIZE):
            part = slice(tower * BATCH, (tower + 1) * BATCH)
            with tf.GradientTape() as tape:
                value = loss()(y[part], towers(x[part]))
            per_tower.append(tape.gradient(value, towers.trainable_variables))
        return [tf.reduce_mean(tf.stack(each), axis=0) for each in zip(*per_tower, strict=True)]

    keras.optimizers.SGD(0.1).apply(tower_gradients(), towers.trainable_variables)
    step(ours, optimizer, own_slice(x, 0), own_slice(y, 0), loss())
    assert differ(initial, values(ours.weights))
    assert relative_difference(values(ours.weights), values(towers.weights)) < 1e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_tape_loop(compiled):
    x, y = samples(BATCH, seed=RANK)
    model = dense_model()
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam())
    optimizer.build(model.trainable_variables)

    def run():
        step(model, optimizer, x, y, loss())

    run = tf.function(run) if compiled else run
    for _ in range(2):
        before = values(model.weights)
        run()
        assert differ(before, values(model.weights))
    assert_equal_on_all_ranks(values(model.weights))


@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_and_dense_gradients(groups, sparse_as_dense):
    """A dense gradient before two sparse ones of other shapes: Horovod's own groups confuse their dense shapes."""

    def make():
        keras.utils.set_random_seed(3)
        features, first, second = (
            layers.Input((4,)),
            layers.Input((3,), dtype="int32"),
            layers.Input((2,), dtype="int32"),
        )
        parts = [layers.Dense(3)(features), layers.Embedding(11, 4)(first), layers.Embedding(23, 5)(second)]
        merged = layers.Concatenate()([layers.Flatten()(part) for part in parts])
        model = keras.Model([features, first, second], layers.Dense(NUM_CLASSES)(merged))
        assert "dense" in model.trainable_variables[0].path
        return model

    rng = np.random.default_rng(1)
    inputs = [
        rng.normal(size=(SIZE * BATCH, 4)).astype(np.float32),
        rng.integers(0, 11, (SIZE * BATCH, 3)),
        rng.integers(0, 23, (SIZE * BATCH, 2)),
    ]
    y = rng.integers(0, NUM_CLASSES, SIZE * BATCH)
    ours, alone = make(), make()
    initial = values(ours.weights)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.5), groups=groups, sparse_as_dense=sparse_as_dense)
    step(ours, optimizer, [own_slice(each, 0) for each in inputs], own_slice(y, 0), loss())
    step(alone, keras.optimizers.SGD(0.5), inputs, y, loss())
    assert differ(initial, values(ours.weights))
    assert_equal_on_all_ranks(values(ours.weights))
    assert relative_difference(values(ours.weights), values(alone.weights)) < 1e-5


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_stay_sparse_by_default(sparse_as_dense):
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(sparse_as_dense=sparse_as_dense))
    gradient = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([RANK, 5]), dense_shape=tf.constant([9, 3]))
    (reduced,) = reduce([gradient]).gradients
    assert isinstance(reduced, tf.IndexedSlices) != sparse_as_dense
    expected = np.zeros((9, 3), np.float32)
    expected[:SIZE] = 1 / SIZE
    expected[5] = 1
    assert tf.convert_to_tensor(reduced).numpy() == pytest.approx(expected)


@pytest.mark.parametrize("groups", [None, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 3))])
def test_small_gradients_share_a_bucket(groups):
    """A large one has its own bucket; each gradient is returned averaged, in its shape."""
    shapes = [(3,), (1 << 18,), (2, 4), (), (5, 1)]
    rng = np.random.default_rng(RANK)
    own = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(groups=groups))
    reduced = reduce([tf.constant(each) for each in own])
    assert len(reduced.buckets) == (groups or 2)
    all_ranks = COLLECTIVES.allgather(own)
    for i, each in enumerate(reduced.gradients):
        assert each.shape == shapes[i]
        assert each.numpy() == pytest.approx(np.mean([rank[i] for rank in all_ranks], axis=0), abs=1e-6)
    for mine, sent in zip(own, reduced.unpack(reduced.sent), strict=True):
        assert np.array_equal(mine, sent)


@pytest.mark.parametrize("one_core", [True, False])
def test_buckets_wait_for_each_other_if_nothing_can_hide_them(one_core, monkeypatch):
    """On one core a reduction cannot overlap with the backward pass."""
    monkeypatch.setattr(devices, "computes_on_one_core", lambda: one_core)
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(groups=2))

    @tf.function(autograph=False)
    def reduced(first, second):
        return reduce([first, second]).gradients

    graph = reduced.get_concrete_function(tf.zeros(3), tf.zeros(4)).graph
    sent = [each for each in graph.get_operations() if each.type == "HorovodAllreduce"]
    # A control input for the other bucket: its own is a data input.
    assert [len(each.control_inputs) for each in sent] == [int(one_core)] * 2
    for each in reduced(tf.fill([3], float(RANK)), tf.fill([4], float(RANK))):
        assert each.numpy() == pytest.approx((SIZE - 1) / 2)


def test_variables_without_a_gradient():
    x, y = samples(BATCH, seed=RANK)
    model = dense_model()
    unused = keras.Variable(np.ones(3, np.float32), name="unused")
    initial = values(model.weights)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01))
    with tf.GradientTape() as tape:
        value = loss()(y, model(x))
    variables = [*model.trainable_variables, unused]
    optimizer.apply(tape.gradient(value, variables), variables)
    assert differ(initial, values(model.weights))
    assert_equal_on_all_ranks(values(model.weights))
    assert np.array_equal(unused.numpy(), np.ones(3))


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 4])
def test_one_reduction_for_all_micro_batches(gradient_accumulation_steps, monkeypatch):
    """Counts executed reductions, not traced ones, and compares with one process."""
    micro_batches = gradient_accumulation_steps
    executed = tf.Variable(0)
    make_reducer = COLLECTIVES.gradient_reducer

    def counting(*arguments):
        reduce = make_reducer(*arguments)

        def count_and_reduce(gradients):
            executed.assign_add(1)
            return reduce(gradients)

        return count_and_reduce

    monkeypatch.setattr(COLLECTIVES, "gradient_reducer", counting)
    updates = 2
    x, y = samples(updates * micro_batches * SIZE * BATCH)
    options = {} if micro_batches == 1 else {"gradient_accumulation_steps": micro_batches}
    model, alone = dense_model(), dense_model()
    initial = values(model.weights)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, **options))
    optimizer.build(model.trainable_variables)

    @tf.function
    def run(batch_x, batch_y):
        step(model, optimizer, batch_x, batch_y, loss())

    plain = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
    for number in range(updates * micro_batches):
        run(tf.constant(own_slice(x, number)), tf.constant(own_slice(y, number)))
    for number in range(updates):
        part = slice(number * micro_batches * SIZE * BATCH, (number + 1) * micro_batches * SIZE * BATCH)
        step(alone, plain, x[part], y[part], loss())
    assert int(executed) == updates
    assert differ(initial, values(model.weights))
    assert_equal_on_all_ranks(values(model.weights))
    assert relative_difference(values(model.weights), values(alone.weights)) < 1e-5


@pytest.mark.parametrize("order", ["outside", "inside", "compile"])
def test_overflow_on_one_rank_is_skipped_by_all(order):
    """Without agreement the finite rank waits in the reduction forever, and the job's timeout fails the test."""
    model = dense_model()
    if order == "outside":
        optimizer = hvdtrain.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
        )
    elif order == "inside":
        optimizer = keras.optimizers.LossScaleOptimizer(
            hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), initial_scale=64.0
        )
    else:
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = dense_model()
            model.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss())
        finally:
            keras.config.set_dtype_policy(policy)
        optimizer = model.optimizer
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = samples(BATCH, seed=RANK)
    optimizer.build(model.trainable_variables)
    scale_before = float(optimizer.dynamic_scale)

    @tf.function
    def run(factor):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss()(y, model(x)))
        gradients = [g * factor for g in tape.gradient(value, model.trainable_variables)]
        optimizer.apply(gradients, model.trainable_variables)

    before = values(model.weights)
    run(tf.constant(np.inf if RANK == SIZE - 1 else 1.0, tf.float32))
    assert not differ(before, values(model.weights))
    assert float(optimizer.dynamic_scale) == scale_before / 2
    run(tf.constant(1.0))
    assert differ(before, values(model.weights))
    assert_equal_on_all_ranks(values(model.weights) + values(optimizer.variables))


def test_fp16_compression_is_close_and_equal():
    x, y = samples(SIZE * BATCH)
    ours, alone = dense_model(), dense_model()
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16")
    step(ours, optimizer, own_slice(x, 0), own_slice(y, 0), loss())
    step(alone, keras.optimizers.SGD(0.1), x, y, loss())
    assert_equal_on_all_ranks(values(ours.weights))
    difference = relative_difference(values(ours.weights), values(alone.weights))
    assert 0 < difference < 2e-3


def test_sum_is_size_times_average():
    x, y = samples(BATCH, seed=RANK)
    summed, averaged = dense_model(), dense_model()
    initial = values(summed.weights)
    step(summed, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), op="sum"), x, y, loss())
    step(averaged, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE)), x, y, loss())
    assert differ(initial, values(summed.weights))
    assert relative_difference(values(summed.weights), values(averaged.weights)) < 1e-5


def test_a_step_compiled_by_xla_equals_one_process():
    """Two embeddings, whose gradients are sparse; the last batch of an epoch is short."""

    def embedding_model() -> keras.Model:
        keras.utils.set_random_seed(5)
        tokens = layers.Input((4,), dtype="int32")
        tables = [layers.Embedding(20, 3)(tokens) for _ in range(2)]
        model = keras.Model(tokens, layers.Dense(NUM_CLASSES)(layers.Flatten()(layers.Concatenate()(tables))))
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss())
        return model

    rng = np.random.default_rng(6)
    x, y = rng.integers(0, 20, (45, 4)).astype(np.int32), rng.integers(0, NUM_CLASSES, 45).astype(np.int32)
    ours, alone = embedding_model(), embedding_model()
    initial = values(ours.weights)
    trainer = make_trainer(ours, Arrays(x, y), batch_size=16 // SIZE, steps=8, steps_per_execution=3, jit_compile=True)
    trainer.fit()
    train_alone(alone, x, y, global_batch=16, seed=0, steps=8)
    assert differ(initial, values(ours.weights))
    assert_equal_on_all_ranks(values(ours.weights) + values(ours.optimizer.variables))
    assert relative_difference(values(ours.weights), values(alone.weights)) < 1e-5


def mean_cross_entropy(labels, logits):
    """Returns one number."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


@pytest.mark.parametrize("quorum", [0, pytest.param(SIZE, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        (
            lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
            "excludes a loss that divides by the number of unmasked positions",
        ),
        (lambda: mean_cross_entropy, "jit_compile=True excludes a loss that returns one number for a batch"),
    ],
)
def test_losses_that_xla_cannot_combine_over_ranks(make_loss, message, quorum, monkeypatch):
    x, y = samples(45, seed=8)

    def made() -> keras.Model:
        model = dense_model()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=make_loss(), jit_compile=True)
        return model

    options = {"batch_size": 16 // SIZE, "steps": 8}
    if quorum:
        options["quorum"] = quorum
    with pytest.raises(hvdtrain.errors.HvdtrainError, match=message):
        make_trainer(made(), Arrays(x, y), jit_compile=True, **options).fit()
    if quorum and "unmasked" in message:
        return  # A quorum excludes this loss too.
    # Chosen as on a GPU, XLA is left out.
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    ours, alone = made(), made()
    alone.jit_compile = False
    trainer = make_trainer(ours, Arrays(x, y), **options)
    assert trainer.config.jit_compile
    trainer.fit()
    train_alone(alone, x, y, global_batch=16, seed=0, steps=8)
    assert_equal_on_all_ranks(values(ours.weights))
    assert relative_difference(values(ours.weights), values(alone.weights)) < 1e-5


def test_too_many_groups_are_refused_on_all_ranks():
    x, y = samples(BATCH)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=99)
    with pytest.raises(hvdtrain.errors.UsageError, match="99 for 4"):
        step(dense_model(), optimizer, x, y, loss())
