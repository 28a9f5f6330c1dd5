"""On every rank: the trainer makes the updates of one process; guards and metrics see every rank."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import NUM_CLASSES, dense_model, loss, relative_difference, samples, values
from one_process import train_alone

import hvdtrain
from hvdtrain import replicas, runtime
from hvdtrain.data import Arrays, evaluation_dataset, training_dataset
from hvdtrain.errors import DataError, DisagreementError, DivergenceError, UsageError
from hvdtrain.failure import JobError, on_every_rank
from hvdtrain.metrics import reduced_results
from hvdtrain.sampling import SamplePlan
from hvdtrain.tasks import digits

TOPOLOGY = hvdtrain.init(seed=0, deterministic=True)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 64
STEPS = 50

OPTIMIZERS = {
    "momentum": lambda **o: keras.optimizers.SGD(0.01, momentum=0.9, **o),
    "adam": lambda **o: keras.optimizers.Adam(1e-3, **o),
    "adamw_clip": lambda **o: keras.optimizers.AdamW(1e-3, global_clipnorm=0.5, **o),
}


def smooth_model() -> keras.Model:
    """The digits network without kinks: near one, the last bit of a sum can decide which way training goes."""
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def make(make_model, model_seed: int, optimizer) -> keras.Model:
    keras.utils.set_random_seed(model_seed)
    model = make_model()
    model.compile(optimizer=optimizer, loss=loss(), metrics=["accuracy"])
    return model


def difference_from_one_process(make_model, name: str, *, accumulate: int = 1, steps_per_call: int = 1) -> float:
    """1,437 samples leave 29 for the last step of an epoch: they do not divide by any number of ranks."""
    data = digits.read_data(None).training
    x, y = data.x, data.y
    options = {} if accumulate == 1 else {"gradient_accumulation_steps": accumulate}
    # Other initial weights on each rank: the broadcast has to mend them before the first step.
    ours = make(make_model, 100 + RANK, OPTIMIZERS[name](**options))
    trainer = hvdtrain.Trainer(
        ours,
        Arrays(x, y),
        batch_size=GLOBAL_BATCH // SIZE // accumulate,
        steps=STEPS,
        seed=5,
        accumulate=accumulate,
        steps_per_call=steps_per_call,
    )
    summary = trainer.fit()
    alone = make(make_model, 100, OPTIMIZERS[name]())
    train_alone(alone, x, y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert summary["steps"] == STEPS
    assert len(set(COLLECTIVES.allgather(summary["weights_sha256"]))) == 1
    return relative_difference(values(ours.weights), values(alone.weights))


LAYOUTS = [("momentum", 1, 1), ("adam", 1, 1), ("adamw_clip", 1, 1), ("momentum", 2, 1), ("momentum", 1, 7)]


@pytest.mark.parametrize(("name", "accumulate", "steps_per_call"), LAYOUTS)
def test_equals_one_process(name, accumulate, steps_per_call):
    difference = difference_from_one_process(smooth_model, name, accumulate=accumulate, steps_per_call=steps_per_call)
    assert difference < 1e-5


@pytest.mark.parametrize(("name", "accumulate", "steps_per_call"), LAYOUTS)
def test_equals_one_process_in_double_precision(name, accumulate, steps_per_call):
    """The network as it is, with ReLU and max-pooling: no kink is within reach of so small a difference."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        difference = difference_from_one_process(
            digits.make_model, name, accumulate=accumulate, steps_per_call=steps_per_call
        )
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    assert difference < 1e-10


@pytest.mark.parametrize("num_samples", [1, 7, 64, 1000])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(3, 1), (16, 1), (5, 3)])
def test_every_sample_once_an_epoch(num_samples, batch_size, accumulate):
    """Reads back the sample numbers that came out of the input pipeline, with their weights."""
    options = {"num_samples": num_samples, "batch_size": batch_size, "size": SIZE, "accumulate": accumulate, "seed": 2}
    if num_samples < SIZE:
        with pytest.raises(UsageError, match="at least one sample for each rank"):
            SamplePlan(rank=RANK, **options)
        return
    plan = SamplePlan(rank=RANK, **options)
    numbers = np.arange(num_samples)
    epochs = 2
    micro_batches = epochs * plan.steps_per_epoch * accumulate
    seen: list[tuple[list[int], float]] = []
    for (x, y), factor in training_dataset(Arrays(numbers, numbers), plan).take(micro_batches):
        assert np.array_equal(x, y)
        seen.append(([int(n) for n in x], float(factor)))
    everyone = COLLECTIVES.allgather(seen)
    assert {len(each) for each in everyone} == {micro_batches}
    per_epoch = plan.steps_per_epoch * accumulate
    for epoch in range(epochs):
        window = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        drawn = [n for rank in everyone for i in window for n in rank[i][0] if rank[i][1] > 0]
        assert sorted(drawn) == list(range(num_samples))
        # Step by step: the samples are the next ones of the one global order, weighted as one mean.
        order = plan.order(epoch)
        for step in range(plan.steps_per_epoch):
            parts = [rank[epoch * per_epoch + step * accumulate + k] for k in range(accumulate) for rank in everyone]
            numbers_of_step = [n for part, factor in parts for n in part if factor > 0]
            first = step * plan.global_batch_size
            assert numbers_of_step == list(order[first : first + plan.global_batch_size])
            shares = [factor / len(part) / len(parts) for part, factor in parts for _ in part if factor > 0]
            assert shares == pytest.approx([1 / len(numbers_of_step)] * len(numbers_of_step), rel=1e-6)


def test_metrics_are_exact_on_uneven_shards():
    x, y = samples(101, seed=4)
    mine = slice(0, 3) if RANK == 0 else slice(3 + (RANK - 1) * 98 // (SIZE - 1), 3 + RANK * 98 // (SIZE - 1))
    binary = (y % 2).astype(np.float32)

    def evaluate(part: slice) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
        model.evaluate(x[part], binary[part], batch_size=8, verbose=0)
        return model

    model, alone = evaluate(mine), evaluate(slice(None))
    own = {name: float(value) for name, value in model.get_metrics_result().items()}
    reduced = reduced_results(model, COLLECTIVES)
    expected = {name: float(value) for name, value in alone.get_metrics_result().items()}
    assert reduced == pytest.approx(expected, rel=1e-6)
    assert own != pytest.approx(expected, rel=1e-6)
    # The rank's own state is as it was.
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == own


def test_evaluation_counts_each_sample_once():
    numbers = np.arange(50)
    seen = [int(n) for x, _ in evaluation_dataset(Arrays(numbers, numbers), 7, RANK, SIZE) for n in x]
    assert sorted(n for each in COLLECTIVES.allgather(seen) for n in each) == list(range(50))


def test_sum_of_several_dtypes_and_shapes():
    arrays = [np.full((2, 3), RANK + 1.0, np.float32), np.array(RANK, np.int64), np.zeros((0,), np.float32)]
    total = SIZE * (SIZE + 1) / 2
    first, second, third = COLLECTIVES.sum(arrays)
    assert np.array_equal(first, np.full((2, 3), total, np.float32))
    assert second == SIZE * (SIZE - 1) // 2
    assert second.shape == ()
    assert third.shape == (0,)


def batchnorm_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )
    model.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), loss=loss())
    return model


def test_start_broadcasts_model_and_optimizer_and_separates_random_streams():
    model = batchnorm_model(seed=RANK)
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(variable + RANK)
    hvdtrain.broadcast(model)
    for theirs in COLLECTIVES.allgather(values(model.weights) + values(model.optimizer.variables)):
        for mine, other in zip(values(model.weights) + values(model.optimizer.variables), theirs, strict=True):
            assert np.array_equal(mine, other)
    assert float(model.optimizer.variables[-1].numpy().flat[0]) == 0.0
    masks = model.layers[2](tf.ones((1, 64)), training=True).numpy()
    assert len({each.tobytes() for each in COLLECTIVES.allgather(masks)}) == SIZE


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64", "uint32", "bool"])
def test_variables_of_each_kind_are_broadcast(dtype):
    variables = [tf.Variable(tf.cast([[RANK, 1, RANK]], dtype)), tf.Variable(tf.cast(RANK, dtype))]
    COLLECTIVES.broadcast(variables, root_rank=SIZE - 1)
    last = tf.cast(SIZE - 1, dtype).numpy()
    assert variables[0].numpy().tolist() == [[last, 1, last]]
    assert variables[1].numpy() == last


def test_moving_statistics_are_equal_wherever_they_are_seen():
    model = batchnorm_model(seed=0)
    hvdtrain.broadcast(model)
    x, y = samples(32, seed=RANK)
    model.fit(x, y, batch_size=8, verbose=0)
    statistics = model.layers[1].moving_mean
    before = COLLECTIVES.allgather(statistics.numpy())
    assert not np.array_equal(before[0], before[-1])
    replicas.require_equal_replicas(model, COLLECTIVES, step=4)
    with replicas.shared_statistics(model, COLLECTIVES):
        seen = COLLECTIVES.allgather(statistics.numpy())
    assert all(np.array_equal(seen[0], each) for each in seen)
    after = COLLECTIVES.allgather(statistics.numpy())
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True)), "looking must change nothing"
    assert seen[0] == pytest.approx(np.mean(before, axis=0), rel=1e-5)


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_one_changed_value_is_found_and_named(which):
    model = batchnorm_model(seed=0)
    hvdtrain.broadcast(model)
    variable = model.layers[0].kernel if which == "model" else model.optimizer.variables[-1]
    if RANK == 1:
        changed = variable.numpy()
        changed.flat[0] += 1e-6
        variable.assign(changed)
    # Of two ranks neither is in the majority: the lower one is taken for right.
    with pytest.raises(DivergenceError, match=r"step 12 .* of rank 1 differs") as caught:
        replicas.require_equal_replicas(model, COLLECTIVES, step=12)
    assert variable.path in str(caught.value)
    assert caught.value.exit_code == 70


def test_disagreement_is_told_on_every_rank_with_the_difference():
    with pytest.raises(DisagreementError, match=r"--batch-size: 8 on .*, 9 on rank 1") as caught:
        replicas.require_agreement("configuration", {"--batch-size": 9 if RANK == 1 else 8}, COLLECTIVES)
    assert caught.value.exit_code == 78
    replicas.require_agreement("configuration", {"--batch-size": 8}, COLLECTIVES)


def test_another_model_on_one_rank_is_refused_before_the_first_step():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4 if RANK == 0 else 5)])
    model.compile(optimizer="sgd", loss="mse")
    x, _ = samples(16)
    trainer = hvdtrain.Trainer(model, Arrays(x, np.zeros((16, 1), np.float32)), batch_size=4, steps=1)
    with pytest.raises(DisagreementError, match="same model"):
        trainer.fit()


def test_other_data_or_arguments_on_one_rank_are_refused():
    same, other = Arrays(*samples(16)), Arrays(*samples(16, seed=RANK))

    def fit(training, evaluation, **arguments):
        model = dense_model()
        model.compile(optimizer="sgd", loss=loss())
        hvdtrain.Trainer(model, training, evaluation, **{"batch_size": 4, "steps": 1, **arguments}).fit()

    with pytest.raises(DisagreementError, match="same training data"):
        fit(other, None)
    with pytest.raises(DisagreementError, match="same evaluation data"):
        fit(same, other)
    # Rank 1 would wait in a reduction for its log line that rank 0 never makes.
    with pytest.raises(DisagreementError, match=r"same arguments of Trainer.*log_every: 1 on rank 0"):
        fit(same, None, log_every=1 + RANK)


def test_an_error_of_one_rank_is_raised_on_all():
    def read() -> None:
        if RANK == SIZE - 1:
            raise DataError("train.bin is missing")

    with pytest.raises(JobError, match=r"train\.bin is missing") as caught:
        on_every_rank(read, COLLECTIVES)
    assert caught.value.exit_code == 65
    assert caught.value.rank == SIZE - 1
    assert on_every_rank(lambda: RANK, COLLECTIVES) == RANK
