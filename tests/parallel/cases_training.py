"""On all ranks: the trainer makes the same updates as one process; checks and metrics cover all ranks."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, relative_difference, samples, values
from one_process import train_alone
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays, evaluation_dataset, training_dataset
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.errors import DataError, DisagreementError, DivergenceError, JobError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.tasks import digits
from hvdtrain.training.metrics import reduced_results

TOPOLOGY = hvdtrain.init(seed=0, deterministic=True, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 64
STEPS = 26  # an epoch of the digits has 23

OPTIMIZERS = {
    "momentum": lambda **o: keras.optimizers.SGD(0.01, momentum=0.9, **o),
    "adam": lambda **o: keras.optimizers.Adam(1e-3, **o),
    "adamw_clip": lambda **o: keras.optimizers.AdamW(1e-3, global_clipnorm=0.5, **o),
}


def smooth_model() -> keras.Model:
    """The digits network without kinks: near a kink, the last bit of a sum can change a gradient."""
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


def make(make_model, model_seed: int, optimizer, metrics=("accuracy",)) -> keras.Model:
    keras.utils.set_random_seed(model_seed)
    model = make_model()
    model.compile(optimizer=optimizer, loss=loss(), metrics=list(metrics))
    return model


@functools.cache
def weights_alone(make_model, name: str, floatx: str) -> list[np.ndarray]:
    """The weights after a training in one process, in the current precision."""
    model, data = make(make_model, 100, OPTIMIZERS[name](), metrics=()), digits.read_data(None).training
    train_alone(model, data.x, data.y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert {variable.dtype for variable in model.weights} == {floatx}
    return values(model.weights)


def difference_from_one_process(
    make_model, name: str, *, gradient_accumulation_steps: int = 1, steps_per_execution: int = 1
) -> float:
    """1,437 samples leave 29 for the last step of an epoch: they do not divide by any number of ranks."""
    data = digits.read_data(None).training
    options = {} if gradient_accumulation_steps == 1 else {"gradient_accumulation_steps": gradient_accumulation_steps}
    # Different initial weights on each rank: the broadcast must make them equal before the first step.
    ours = make(make_model, 100 + RANK, OPTIMIZERS[name](**options))
    trainer = make_trainer(
        ours,
        Arrays(data.x, data.y),
        batch_size=GLOBAL_BATCH // SIZE // gradient_accumulation_steps,
        steps=STEPS,
        seed=5,
        gradient_accumulation_steps=gradient_accumulation_steps,
        steps_per_execution=steps_per_execution,
    )
    summary = trainer.fit()
    assert summary["steps"] == STEPS
    assert len(set(COLLECTIVES.allgather(summary["weights_sha256"]))) == 1
    return relative_difference(values(ours.weights), weights_alone(make_model, name, keras.config.floatx()))


LAYOUTS = [("momentum", 1, 1), ("adam", 1, 1), ("adamw_clip", 1, 1), ("momentum", 2, 1), ("momentum", 1, 7)]


@pytest.mark.parametrize(
    ("name", "gradient_accumulation_steps", "steps_per_execution"),
    [LAYOUTS[-1], *(pytest.param(*layout, marks=pytest.mark.long) for layout in LAYOUTS[:-1])],
)
def test_equals_one_process(name, gradient_accumulation_steps, steps_per_execution):
    difference = difference_from_one_process(
        smooth_model,
        name,
        gradient_accumulation_steps=gradient_accumulation_steps,
        steps_per_execution=steps_per_execution,
    )
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("name", "gradient_accumulation_steps", "steps_per_execution"),
    [*LAYOUTS[2:4], *(pytest.param(*layout, marks=pytest.mark.long) for layout in (*LAYOUTS[:2], *LAYOUTS[4:]))],
)
def test_equals_one_process_in_double_precision(name, gradient_accumulation_steps, steps_per_execution):
    """The digits network itself, with ReLU and max pooling: differences are too small to cross a kink."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        difference = difference_from_one_process(
            digits.make_model,
            name,
            gradient_accumulation_steps=gradient_accumulation_steps,
            steps_per_execution=steps_per_execution,
        )
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    assert difference < 1e-10


@pytest.mark.parametrize("num_samples", [1, 7, 64, 1000])
@pytest.mark.parametrize(("batch_size", "gradient_accumulation_steps"), [(3, 1), (16, 1), (5, 3)])
def test_every_sample_once_per_epoch(num_samples, batch_size, gradient_accumulation_steps):
    """Collects the sample numbers that the input pipeline yields, with their weights."""
    options = {"num_samples": num_samples, "batch_size": batch_size, "size": SIZE, "seed": 2}
    options["gradient_accumulation_steps"] = gradient_accumulation_steps
    if num_samples < SIZE:
        with pytest.raises(UsageError, match="at least one sample for each rank"):
            SamplePlan(rank=RANK, **options)
        return
    plan = SamplePlan(rank=RANK, **options)
    numbers = np.arange(num_samples)
    epochs = 2
    micro_batches = epochs * plan.steps_per_epoch * gradient_accumulation_steps
    seen: list[tuple[list[int], float]] = []
    for (x, y), factor in training_dataset(Arrays(numbers, numbers), plan).take(micro_batches):
        assert np.array_equal(x, y)
        seen.append(([int(n) for n in x], float(factor)))
    all_ranks = COLLECTIVES.allgather(seen)
    assert {len(each) for each in all_ranks} == {micro_batches}
    per_epoch = plan.steps_per_epoch * gradient_accumulation_steps
    for epoch in range(epochs):
        window = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        drawn = [n for rank in all_ranks for i in window for n in rank[i][0] if rank[i][1] > 0]
        assert sorted(drawn) == list(range(num_samples))
        # In each step: the next samples of the global order, weighted so that their sum is a mean.
        order = plan.order(epoch)
        for step in range(plan.steps_per_epoch):
            parts = [
                rank[epoch * per_epoch + step * gradient_accumulation_steps + k]
                for k in range(gradient_accumulation_steps)
                for rank in all_ranks
            ]
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
    # The rank's own state has not changed.
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


def test_broadcast_sends_model_and_optimizer_and_separates_random_streams():
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
def test_variables_of_each_dtype_are_broadcast(dtype):
    variables = [tf.Variable(tf.cast([[RANK, 1, RANK]], dtype)), tf.Variable(tf.cast(RANK, dtype))]
    COLLECTIVES.broadcast(variables, root_rank=SIZE - 1)
    last = tf.cast(SIZE - 1, dtype).numpy()
    assert variables[0].numpy().tolist() == [[last, 1, last]]
    assert variables[1].numpy() == last


def test_shared_statistics_are_the_mean_over_ranks_and_are_restored():
    model = batchnorm_model(seed=0)
    hvdtrain.broadcast(model)
    x, y = samples(32, seed=RANK)
    model.fit(x, y, batch_size=8, verbose=0)
    statistics = model.layers[1].moving_mean
    before = COLLECTIVES.allgather(statistics.numpy())
    assert not np.array_equal(before[0], before[-1])
    replica_consistency.require_equal_replicas(model, COLLECTIVES, step=4)
    with replica_consistency.shared_statistics(model, COLLECTIVES):
        seen = COLLECTIVES.allgather(statistics.numpy())
    assert all(np.array_equal(seen[0], each) for each in seen)
    after = COLLECTIVES.allgather(statistics.numpy())
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True)), "the statistics must be restored"
    assert seen[0] == pytest.approx(np.mean(before, axis=0), rel=1e-5)


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_one_changed_value_is_detected_and_named(which):
    model = batchnorm_model(seed=0)
    hvdtrain.broadcast(model)
    variable = model.layers[0].kernel if which == "model" else model.optimizer.variables[-1]
    if RANK == 1:
        changed = variable.numpy()
        changed.flat[0] += 1e-6
        variable.assign(changed)
    # With two ranks there is no majority: rank 0 counts as correct.
    with pytest.raises(DivergenceError, match=r"step 12 .* of rank 1 differs") as caught:
        replica_consistency.require_equal_replicas(model, COLLECTIVES, step=12)
    assert variable.path in str(caught.value)
    assert caught.value.exit_code == 70


def test_disagreement_is_raised_on_all_ranks_with_the_difference():
    with pytest.raises(DisagreementError, match=r"--batch-size: 8 on .*, 9 on rank 1") as caught:
        require_agreement("configuration", {"--batch-size": 9 if RANK == 1 else 8}, COLLECTIVES)
    assert caught.value.exit_code == 78
    require_agreement("configuration", {"--batch-size": 8}, COLLECTIVES)


def test_a_different_model_on_one_rank_is_refused_before_the_first_step():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4 if RANK == 0 else 5)])
    model.compile(optimizer="sgd", loss="mse")
    x, _ = samples(16)
    trainer = make_trainer(model, Arrays(x, np.zeros((16, 1), np.float32)), batch_size=4, steps=1)
    with pytest.raises(DisagreementError, match="same model"):
        trainer.fit()


def test_different_data_or_arguments_on_one_rank_are_refused(tmp_path):
    same, other = Arrays(*samples(16)), Arrays(*samples(16, seed=RANK))

    def fit(training, evaluation, saves=False, **arguments):
        model = dense_model()
        model.compile(optimizer="sgd", loss=loss())
        if saves:
            arguments["checkpointer"] = hvdtrain.Checkpointer(tmp_path, model)
        make_trainer(model, training, evaluation, **{"batch_size": 4, "steps": 1, **arguments}).fit()

    with pytest.raises(DisagreementError, match="same training data"):
        fit(other, None)
    with pytest.raises(DisagreementError, match="same evaluation data"):
        fit(same, other)
    # Otherwise a rank would wait in a reduction for a log line that the other does not write at this step.
    with pytest.raises(DisagreementError, match=r"same arguments of Trainer.*log_every: 1 on rank 0"):
        fit(same, None, log_every=1 + RANK)
    # Otherwise it would wait in a save.
    with pytest.raises(DisagreementError, match=r"same arguments of Trainer.*checkpointer: 'given' on rank 0"):
        fit(same, None, saves=RANK == 0)


def test_an_error_on_one_rank_is_raised_on_all_ranks():
    def read() -> None:
        if RANK == SIZE - 1:
            raise DataError("train.bin is missing")

    with pytest.raises(JobError, match=r"train\.bin is missing") as caught:
        on_every_rank(read, COLLECTIVES)
    assert caught.value.exit_code == 65
    assert caught.value.rank == SIZE - 1
    assert on_every_rank(lambda: RANK, COLLECTIVES) == RANK
