"""On all ranks: model.fit with DistributedOptimizer and hvdtrain.callbacks.distributed."""

import csv
import functools
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, relative_difference, samples, values

import hvdtrain
from hvdtrain.callbacks import (
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    distributed,
)
from hvdtrain.distributed import runtime
from hvdtrain.errors import DisagreementError, DivergenceError, JobError, UsageError
from hvdtrain.training import own_tuning, step_trials

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH = 4
X, Y = samples(8 * SIZE * BATCH, seed=1)
SHARD_X, SHARD_Y = X[RANK::SIZE], Y[RANK::SIZE]
TEST_X, TEST_Y = samples(53, seed=2)
# The first rank has few of them, and all ranks have another number.
CUTS = [0, 5, *np.linspace(5, 53, SIZE).astype(int)[1:]]
TEST_SHARD = TEST_X[CUTS[RANK] : CUTS[RANK + 1]], TEST_Y[CUTS[RANK] : CUTS[RANK + 1]]


def compiled(optimizer=None, model=None, **options) -> keras.Model:
    model = model or dense_model()
    optimizer = hvdtrain.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, **{"loss": loss(), "metrics": ["accuracy"], **options})
    return model


def fit(callbacks, model=None, *, epochs=4, **options) -> tuple[keras.Model, dict]:
    model = model or compiled()
    if model.built:
        hvdtrain.broadcast(model)
    history = model.fit(
        options.pop("x", SHARD_X),
        options.pop("y", SHARD_Y),
        **{"batch_size": BATCH, "epochs": epochs, "verbose": 0, "validation_data": TEST_SHARD, **options},
        callbacks=callbacks,
    )
    return model, history.history


def assert_same_on_all_ranks(value) -> None:
    all_ranks = COLLECTIVES.allgather(value)
    assert all(each == all_ranks[0] for each in all_ranks), all_ranks


def digests(model) -> list[bytes]:
    return [v.tobytes() for v in values([*model.weights, *model.optimizer.variables])]


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs: list[dict] = []
        self.batches: list[dict] = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


class BatchRecorder(Recorder):
    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


def test_xla_is_left_out_of_steps_that_reduce():
    """Keras chooses it by itself on a GPU, and it cannot compile Horovod's operations."""
    model, _ = fit([], compiled(jit_compile=True), epochs=1)
    assert_same_on_all_ranks(digests(model))
    assert model.jit_compile  # for evaluation and prediction


@pytest.mark.parametrize("average", [distributed, lambda callbacks: [MetricAverageCallback(), *callbacks]])
def test_values_are_those_of_one_process(average):
    recorder = Recorder()
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    model, history = fit(average([recorder]), compiled(keras.optimizers.SGD(0.0), metrics=metrics), epochs=2)
    assert_same_on_all_ranks(recorder.epochs)
    training = model.evaluate(X, Y, verbose=0, return_dict=True)
    validation = model.evaluate(TEST_X, TEST_Y, verbose=0, return_dict=True)
    expected = training | {f"val_{name}": value for name, value in validation.items()}
    for each in recorder.epochs:
        assert each == pytest.approx(expected, rel=1e-5)
    assert {name: each[-1] for name, each in history.items()} == recorder.epochs[-1]


def test_values_of_batches_are_those_of_one_process():
    recorder = BatchRecorder()
    model, _ = fit(distributed([recorder]), compiled(keras.optimizers.SGD(0.0)), epochs=1, shuffle=False)
    assert_same_on_all_ranks(recorder.batches)
    for count, found in enumerate(recorder.batches, start=1):
        end = count * BATCH * SIZE
        assert found == pytest.approx(model.evaluate(X[:end], Y[:end], verbose=0, return_dict=True), rel=1e-5)


def test_values_without_a_metric_of_that_name_are_averaged():
    class Custom(keras.Model):
        def train_step(self, data):
            return {"total": super().train_step(data)["loss"], "rank": float(RANK)}

    inputs = layers.Input((6,))
    model = compiled(model=Custom(inputs, layers.Dense(NUM_CLASSES)(inputs)))
    _, history = fit(distributed(), model, epochs=2)
    assert_same_on_all_ranks(history)
    assert history["rank"] == [(SIZE - 1) / 2] * 2


@pytest.mark.parametrize("monitor", ["loss", "val_loss"])
def test_deciders_decide_alike(monitor):
    """Thresholds at which the ranks' own values would decide differently."""
    plateau = keras.callbacks.ReduceLROnPlateau(monitor=monitor, factor=0.5, patience=1, min_delta=0.02)
    stopping = keras.callbacks.EarlyStopping(
        monitor=monitor, patience=3, min_delta=0.02, restore_best_weights=True, verbose=1
    )
    model, history = fit(distributed([plateau, stopping]), epochs=40)
    assert 2 < len(history["loss"]) < 40
    assert float(model.optimizer.learning_rate) < 0.1
    assert_same_on_all_ranks((history, stopping.best, float(model.optimizer.learning_rate), digests(model)))


def test_a_callback_that_stops_one_rank_stops_all_ranks():
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = RANK == SIZE - 1 and epoch == 1

    class StopsAtBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = RANK == 0 and batch == 2

    _, history = fit(distributed([Stops()]))
    assert len(history["loss"]) == 2
    model, history = fit(distributed([StopsAtBatch()]))
    assert (len(history["loss"]), int(model.optimizer.iterations)) == (1, 3)


def test_terminate_on_nan_ends_all_ranks():
    x = SHARD_X.copy()
    if RANK == SIZE - 1:
        x[2 * BATCH] = np.nan
    model, _ = fit(distributed([keras.callbacks.TerminateOnNaN()]), x=x, shuffle=False, validation_data=None)
    assert int(model.optimizer.iterations) == 3


def test_writers_and_the_progress_bar_run_on_rank_0(folder, capsys):
    callbacks = [
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        keras.callbacks.ModelCheckpoint(folder / "m.weights.h5", save_weights_only=True),
        keras.callbacks.TensorBoard(folder / "tensorboard", update_freq=2),
        keras.callbacks.EarlyStopping(patience=0, mode="max", verbose=1),
    ]
    model, history = fit(distributed(callbacks), verbose=2, epochs=2)
    printed = capsys.readouterr().out
    assert ("val_loss" in printed) == (RANK == 0), printed
    assert bool(printed) == (RANK == 0), printed
    COLLECTIVES.barrier()
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(history["val_loss"], rel=1e-6)
    loaded = dense_model()
    loaded.load_weights(folder / "m.weights.h5")
    assert [v.tobytes() for v in values(loaded.weights)] == [v.tobytes() for v in values(model.weights)]
    assert len(list((folder / "tensorboard").rglob("events.*"))) == 2


def test_callbacks_and_the_final_model_have_the_statistics_of_all_ranks():
    def model():
        keras.utils.set_random_seed(7)
        return keras.Sequential([layers.Input((6,)), layers.BatchNormalization(), layers.Dense(NUM_CLASSES)])

    class Statistics(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.recorded: list[list] = []

        def on_epoch_end(self, epoch, logs=None):
            self.recorded.append([v.numpy().tolist() for v in self.model.non_trainable_weights])

    own, shared = Statistics(), Statistics()
    fit([own], compiled(model=model()), epochs=2, shuffle=False)
    trained, _ = fit(distributed([shared]), compiled(model=model()), epochs=2, shuffle=False)
    all_ranks = COLLECTIVES.allgather(own.recorded)
    assert all_ranks[0] != all_ranks[-1]
    for found, mean in zip(shared.recorded, np.mean(all_ranks, axis=0), strict=True):
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-7)
    assert_same_on_all_ranks((shared.recorded, digests(trained)))


def test_a_model_that_fit_builds_is_broadcast():
    keras.utils.set_random_seed(RANK)
    model = compiled(model=keras.Sequential([layers.Dense(8), layers.Dense(NUM_CLASSES)]))
    assert not model.built
    fit(distributed([BroadcastGlobalVariablesCallback()]), model, epochs=1)
    assert_same_on_all_ranks(digests(model))


class Rates(keras.callbacks.Callback):
    only_sets_learning_rate = True

    def __init__(self):
        super().__init__()
        self.recorded: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.recorded.append(float(self.model.optimizer.learning_rate))


class Traced(layers.Layer):
    times = 0

    def call(self, inputs):
        self.times += tf.inside_function()
        return inputs


@pytest.mark.parametrize("options", [{}, {"compression": "fp16"}, {"compression": "powersgd:2"}])
@pytest.mark.parametrize("is_broadcast", [True, False])
def test_a_step_is_traced_once(options, is_broadcast):
    def mean_error(y_true, y_pred):
        return tf.reduce_mean((tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), NUM_CLASSES) - y_pred) ** 2)

    keras.utils.set_random_seed(7)
    traced = Traced()
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8), traced, layers.Dense(NUM_CLASSES)])
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(use_ema=True), **options)
    model.compile(optimizer, mean_error, metrics=["accuracy"])
    if is_broadcast:
        hvdtrain.broadcast(model)
    traced.times = 0
    model.fit(SHARD_X, SHARD_Y, batch_size=BATCH, verbose=0)
    assert traced.times == 1


def test_learning_rates_are_warmed_up_and_scheduled():
    rates = Rates()
    steps = len(SHARD_X) // BATCH
    warmup = LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2)
    schedule = LearningRateScheduleCallback(0.1 * SIZE, lambda epoch: 0.1, start_epoch=3)
    _, history = fit(distributed([warmup, schedule, rates]), epochs=4)
    raised = [0.1 + 0.1 * (SIZE - 1) * (i + 1) / (2 * steps) for i in range(2 * steps)]
    assert rates.recorded == pytest.approx(raised + [0.1 * SIZE] * steps + [0.01 * SIZE] * steps, rel=1e-5)
    assert history["learning_rate"] == pytest.approx([rates.recorded[i * steps - 1] for i in (1, 2, 3, 4)])


@pytest.mark.parametrize("make", [keras.optimizers.SGD, pytest.param(keras.optimizers.RMSprop, marks=pytest.mark.long)])
def test_the_momentum_is_corrected_when_the_learning_rate_changes(make):
    """The accumulated updates are scaled with the learning rate, as if it had always been the new one."""

    def velocities(correction: bool):
        model = compiled(make(0.1, momentum=0.9))
        taken: list[list[np.ndarray]] = []

        class Velocities(keras.callbacks.Callback):
            only_sets_learning_rate = True

            def on_train_batch_begin(self, batch, logs=None):
                optimizer = self.model.optimizer
                taken.append(values(getattr(optimizer, "momentums", None) or optimizer._momentums))

        halved = LearningRateScheduleCallback(0.1, 0.5, momentum_correction=correction)
        fit(distributed([halved, Velocities()]), model, epochs=2, shuffle=False)
        return taken[len(SHARD_X) // BATCH]

    for scaled, kept in zip(velocities(True), velocities(False), strict=True):
        np.testing.assert_array_equal(scaled, kept * np.float32(0.5))


def test_writers_may_be_given_to_rank_0_alone(folder):
    """As in every example of Horovod: if hvd.rank() == 0: callbacks.append(…)."""
    writers = [keras.callbacks.ModelCheckpoint(folder / "a.keras"), keras.callbacks.CSVLogger(folder / "a.csv")]
    fit(distributed(writers if RANK == 0 else []))
    fit([keras.callbacks.ModelCheckpoint(folder / "b.keras")] if RANK == 0 else [])
    own = keras.callbacks.ModelCheckpoint(folder / f"rank{RANK}.keras")
    fit([own])
    COLLECTIVES.barrier()
    names = {each.name for each in folder.iterdir()}
    assert names == {"a.keras", "a.csv", "b.keras", *(f"rank{rank}.keras" for rank in range(SIZE))}


def test_what_cannot_work_is_refused(folder):
    with pytest.raises(UsageError, match="BackupAndRestore"):
        distributed([keras.callbacks.BackupAndRestore(folder / "backup")])
    with pytest.raises(UsageError, match="root_rank must be 0"):
        BroadcastGlobalVariablesCallback(1)
    with pytest.raises(
        DisagreementError, match=r"the same callbacks\. .* Pass all callbacks on every rank: those that"
    ):
        fit(distributed([keras.callbacks.TerminateOnNaN()] if RANK == 0 else []))
    with pytest.raises(
        UsageError, match=r"ModelCheckpoint on ranks 0 and 1, which both write to .*callbacks\.distributed"
    ):
        fit([keras.callbacks.ModelCheckpoint(folder / "a.keras")])
    with pytest.raises(
        UsageError, match=r"BackupAndRestore on ranks 0 and 1, .* hvdtrain\.callbacks\.Checkpoint instead"
    ):
        fit([keras.callbacks.BackupAndRestore(folder / "backup")])
    with pytest.raises(UsageError, match=r"a run must have one Checkpoint\. Received: 2"):
        distributed([Checkpoint(folder / "a"), Checkpoint(folder / "b")])
    with pytest.raises(UsageError, match='every must be "epoch" or a number of steps'):
        Checkpoint(folder / "a", every=0)
    with pytest.raises(UsageError, match=r"Checkpoint must be called by hvdtrain\.callbacks\.distributed"):
        fit([Checkpoint(folder / "a")])
    with pytest.raises(DisagreementError, match="epochs"):
        fit(distributed(), epochs=2 + RANK)
    with pytest.raises(UsageError, match=r"rank 0 starts its validation, rank 1 ends its epoch without a validation"):
        fit(distributed(), validation_data=TEST_SHARD if RANK == 0 else None)
    plain = dense_model()
    plain.compile(optimizer="sgd", loss=loss())
    with pytest.raises(UsageError, match=r"sgd.*, which averages nothing over ranks"):
        fit(distributed(), plain)
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(UsageError, match="CosineDecay"):
        fit(distributed([LearningRateWarmupCallback(0.1)]), compiled(keras.optimizers.SGD(rate)))


WITH_AND_WITHOUT = pytest.mark.parametrize("callbacks", [distributed, list])


@WITH_AND_WITHOUT
def test_different_numbers_of_steps_are_refused_before_the_first(callbacks):
    count = len(SHARD_X) - (BATCH if RANK == 1 else 0)
    found = r"same number of steps per epoch\. Received: 8 on rank 0, 7 on rank 1.* Rank 1 would end .* after step 7"
    with pytest.raises(UsageError, match=found):
        fit(callbacks(), x=SHARD_X[:count], y=SHARD_Y[:count])


IS_ODD = RANK % 2
DIFFERENT = {
    "epochs": (compiled, {"epochs": 1 + IS_ODD}, "1 on rank.* 0.*, 2 on rank.* 1"),
    "initial_epoch": (compiled, {"initial_epoch": IS_ODD}, "0 on rank.* 0.*, 1 on rank.* 1"),
    "class_weight": (compiled, {"class_weight": {0: 1.5 + IS_ODD}}, "{'0': 1.5} on rank.* 0.*, {'0': 2.5} on rank.* 1"),
    "steps_per_execution": (lambda: compiled(steps_per_execution=1 + IS_ODD), {}, "1 on rank.* 0.*, 2 on rank.* 1"),
    "run_eagerly": (lambda: compiled(run_eagerly=RANK == 0), {}, "True on rank 0, False on rank.* 1"),
    "metrics": (lambda: compiled(metrics=["accuracy"] if RANK else None), {}, r"missing on rank 0, \['accuracy'\] on"),
    "clipnorm": (lambda: compiled(keras.optimizers.SGD(clipnorm=1.0 + IS_ODD)), {}, "1.0 on rank.* 0.*, 2.0 on"),
}


@pytest.mark.parametrize("callbacks", [distributed, list])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_arguments_are_refused_before_the_first_step(callbacks, name):
    make_model, arguments, found = DIFFERENT[name]
    with pytest.raises(DisagreementError, match=f"arguments of .*. Received: {name}: .*{found}"):
        fit(callbacks(), make_model(), **arguments)


def test_rates_of_rank_0_are_broadcast_when_training_begins():
    model = compiled(keras.optimizers.SGD(0.1 + RANK))
    model.fit(
        SHARD_X, SHARD_Y, batch_size=BATCH, verbose=0, callbacks=distributed([BroadcastGlobalVariablesCallback(0)])
    )
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)


def test_models_of_other_shapes_are_refused_before_they_are_broadcast():
    model = compiled(model=keras.Sequential([layers.Input((6,)), layers.Dense(2 + IS_ODD)]))
    with pytest.raises(DisagreementError, match=r"the same model. Received: model variable 0: .*\(6, 2\)"):
        hvdtrain.broadcast(model)


def of_unknown_length(count=None) -> tf.data.Dataset:
    spec = (tf.TensorSpec((6,)), tf.TensorSpec((), tf.int32))
    pairs = zip(SHARD_X[:count], SHARD_Y[:count], strict=True)
    dataset = tf.data.Dataset.from_generator(lambda: iter(list(pairs)), output_signature=spec)
    return dataset.cache().batch(BATCH)


# The loss of ignore_class is reduced in the forward pass, before any gradient.
MODELS = {
    "graph": {},
    "three steps a call": {"steps_per_execution": 3},
    "eager": {"run_eagerly": True, "metrics": None},
    "loss over ranks": {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)},
}
# Each two values of two parameters together; the long tier has all combinations.
OFTEN = {
    (distributed, "graph", False),
    (list, "loss over ranks", True),
}


@pytest.mark.parametrize(
    ("callbacks", "name", "validates"),
    [
        pytest.param(*each, marks=[] if each in OFTEN else pytest.mark.long)
        for each in itertools.product((distributed, list), MODELS, (False, True))
    ],
)
def test_data_of_unknown_length_that_ends_on_one_rank_is_reported(callbacks, name, validates):
    arguments = {"y": None, "batch_size": None, "validation_data": TEST_SHARD if validates else None}
    model = compiled(**MODELS[name])
    fit(callbacks(), model, epochs=2, x=of_unknown_length(), **arguments)
    short = of_unknown_length(5 * BATCH if RANK == 1 else len(SHARD_X))
    with pytest.raises(UsageError, match=r"Received: rank 1 ended epoch 1 after 5 steps, and other ranks have more"):
        fit(callbacks(), model, x=short, **arguments)


@WITH_AND_WITHOUT
def test_an_epoch_that_ends_with_the_data_ends_on_all_ranks(callbacks):
    """Keras warns, and begins the data again in the next epoch."""
    options = {"epochs": 3, "steps_per_epoch": 5, "shuffle": False, "validation_data": None, "verbose": 0}
    alone = dense_model()
    alone.compile(keras.optimizers.SGD(0.1), loss())
    model = compiled()
    hvdtrain.broadcast(model)
    alone.set_weights(model.get_weights())
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = alone.fit(X, Y, batch_size=SIZE * BATCH, **options).history["loss"]
    with pytest.warns(UserWarning, match="ran out of data"):
        _, history = fit(callbacks(), model, **options)
    assert int(model.optimizer.iterations) == 5 + 3 + 5
    assert relative_difference(values(model.weights), values(alone.weights)) < 1e-5
    if callbacks is distributed:
        assert history["loss"] == pytest.approx(expected, rel=1e-5)


@WITH_AND_WITHOUT
def test_data_of_unknown_length_that_ends_before_its_epoch_is_reported(callbacks):
    with pytest.raises(UsageError, match=rf"the data of rank {RANK} ended in epoch 1 after 8 of 9 steps, and a rank"):
        fit(callbacks(), x=of_unknown_length(), y=None, batch_size=None, steps_per_epoch=9, validation_data=None)


def test_callbacks_that_decide_differently_are_detected_without_distributed():
    def stop(epoch, logs):
        model.stop_training = epoch == 1 and RANK == 1

    def change_rate(epoch, logs):
        model.optimizer.learning_rate = 0.1 * (RANK + 1)

    for decide, found in [
        (stop, "stop_training after epoch 2: False on rank 0, True on rank 1"),
        (change_rate, "rate"),
    ]:
        model = compiled()
        with pytest.raises(UsageError, match=f"must decide alike .*{found}.*callbacks.distributed"):
            fit([keras.callbacks.LambdaCallback(on_epoch_end=decide)], model)


def test_a_forgotten_broadcast_is_detected_at_the_first_step():
    keras.utils.set_random_seed(RANK)
    model = compiled(model=keras.Sequential([layers.Input((6,)), layers.Dense(NUM_CLASSES)]))
    with pytest.raises(DivergenceError, match=r"dense.*/kernel' of rank.* 1.* differs .* Call hvdtrain\.broadcast"):
        model.fit(SHARD_X, SHARD_Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("uses_optimizer", [True, False])
def test_updates_that_average_nothing_are_detected(uses_optimizer):
    class TwoUpdates(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(value, self.trainable_variables)
            self.optimizer.apply(gradients[:1], self.trainable_variables[:1])
            if uses_optimizer:
                self.other.apply(gradients[1:], self.trainable_variables[1:])
            else:
                self.trainable_variables[1].assign_add(0.1 * tf.reduce_mean(x) * tf.ones_like(gradients[1]))
            return {"loss": value}

    inputs = layers.Input((6,))
    model = compiled(model=TwoUpdates(inputs, layers.Dense(NUM_CLASSES)(inputs)), metrics=None)
    model.other = keras.optimizers.SGD(0.1)
    model.other.build(model.trainable_variables[1:])
    error, text = (UsageError, "must be distributed") if uses_optimizer else (DivergenceError, "After a step")
    with pytest.raises(error, match=text):
        fit(distributed(), model)


@functools.cache
def weights_alone(count: int) -> list[np.ndarray]:
    """The weights after a training on the first samples in one process."""
    alone = dense_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss())
    alone.fit(X[:count], Y[:count], batch_size=BATCH * SIZE, epochs=2, shuffle=False, verbose=0)
    return values(alone.weights)


@pytest.mark.parametrize("kind", ["arrays", "samples", "unknown length"])
def test_sharded_data_trains_as_one_process(kind):
    """With a number of samples that the ranks cannot divide; SGD sees the same batches."""
    count = 8 * SIZE * BATCH - 1
    x, y = X[:count], Y[:count]
    data = {"x": x, "y": y}
    if kind == "arrays":
        data["x"], data["y"] = hvdtrain.shard(x, y)
    else:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        if kind == "unknown length":
            dataset = dataset.filter(lambda *_: True)
        data = {"x": hvdtrain.shard(dataset).batch(BATCH), "y": None, "batch_size": None}
    model, _ = fit(distributed(), **data, shuffle=False, epochs=2)
    assert relative_difference(values(model.weights), weights_alone(count // SIZE * SIZE)) < 1e-6


def test_accumulated_gradients_train_as_one_process(capsys):
    """An update of two batches begins in one epoch and ends in the next, while ranks hold gradients of their own."""
    count = 7 * SIZE * BATCH
    optimizer = {"gradient_accumulation_steps": 2}
    alone = dense_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.1, **optimizer), loss=loss())
    alone.fit(X[:count], Y[:count], batch_size=BATCH * SIZE, epochs=2, shuffle=False, verbose=0)
    model = compiled(keras.optimizers.SGD(0.1, **optimizer), metrics=None)
    x, y = hvdtrain.shard(X[:count], Y[:count])
    fit(distributed(), model, x=x, y=y, shuffle=False, epochs=2)
    assert relative_difference(values(model.weights), values(alone.weights)) < 1e-6
    # The first check waits for an update.
    assert "cannot be compared" not in capsys.readouterr().err


def test_a_validation_split_of_shards_is_that_of_one_process():
    alone = dense_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss(), metrics=["accuracy"])
    how = {"epochs": 2, "shuffle": False, "validation_split": 0.25, "verbose": 0}
    expected = alone.fit(X, Y, batch_size=BATCH * SIZE, **how).history
    x, y = hvdtrain.shard(X, Y)
    model, history = fit(distributed(), x=x, y=y, validation_data=None, **how)
    assert relative_difference(values(model.weights), values(alone.weights)) < 1e-6
    assert {name: pytest.approx(each, rel=1e-5) for name, each in expected.items()} == history


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
def test_synchronized_batch_normalization_is_that_of_one_process(options):
    def make_model():
        normalization = layers.BatchNormalization(synchronized=True)
        keras.utils.set_random_seed(7)
        hidden = layers.Dense(8, use_bias=False)
        return keras.Sequential([layers.Input((6,)), hidden, normalization, layers.Dense(NUM_CLASSES)])

    alone = make_model()
    alone.compile(keras.optimizers.SGD(0.1), loss())
    alone.fit(X, Y, batch_size=SIZE * BATCH, epochs=2, shuffle=False, verbose=0)
    model, _ = fit(distributed(), compiled(model=make_model(), **options), epochs=2, shuffle=False)
    assert relative_difference(values(model.weights), values(alone.weights)) < 1e-4


def test_layers_adapted_on_shards_compute_alike_on_all_ranks():
    normalization = layers.Normalization()
    normalization.adapt(SHARD_X + 10 * RANK)
    model = compiled(model=keras.Sequential([layers.Input((6,)), normalization, layers.Dense(NUM_CLASSES)]))
    fit(distributed(), model, epochs=1)
    assert_same_on_all_ranks((model.predict(X, verbose=0).tobytes(), digests(model)))
    normalization.adapt(SHARD_X + 10 * RANK)
    with pytest.raises(DivergenceError, match=r"mean of layer .* of ranks? .* differs"):
        model.fit(SHARD_X, SHARD_Y, batch_size=BATCH, epochs=1, verbose=0, callbacks=distributed())


def test_ranks_draw_differently_from_the_global_stream():
    drawn: list[np.ndarray] = []

    class Noise(layers.Layer):
        def call(self, inputs):
            noise = keras.random.normal(keras.ops.shape(inputs))
            kept = tf.numpy_function(lambda n: [drawn.append(n), n][1], [noise], tf.float32)
            return inputs + tf.ensure_shape(kept, noise.shape)

    model = compiled(model=keras.Sequential([layers.Input((6,)), Noise(), layers.Dense(NUM_CLASSES)]))
    fit(distributed(), model, epochs=1, validation_data=None)
    all_ranks = COLLECTIVES.allgather(drawn[-1].tolist())
    assert all(each != all_ranks[0] for each in all_ranks[1:])


def test_autotune_measures_calls_and_leaves_no_trace(monkeypatch, capsys):
    monkeypatch.setattr(step_trials, "BLOCK_S", 0.01)
    monkeypatch.setattr(own_tuning, "STEPS_PER_EXECUTION", (1, 4))

    def make_model():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(NUM_CLASSES)])
        return compiled(model=model)

    def train(tunes):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        steps = hvdtrain.autotune(make_model, (SHARD_X[:BATCH], SHARD_Y[:BATCH])) if tunes else 1
        model, _ = fit([], make_model(), epochs=1)
        return steps, values(model.weights), [layer.name for layer in model.layers]

    _, weights, names = train(tunes=False)
    capsys.readouterr()
    steps, tuned_weights, tuned_names = train(tunes=True)
    assert_same_on_all_ranks(steps)
    assert tuned_names == names
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(tuned_weights, weights, strict=True))
    printed = capsys.readouterr().err
    assert (f"hvdtrain: steps_per_execution={steps}: " in printed) == (RANK == 0)
    if RANK == 0:
        times = {int(number): float(ms) for ms, number in re.findall(r"([0-9.]+) ms with (\d+)", printed)}
        assert list(times) == [1, 4]
        assert steps == 1 or times[steps] == min(times.values())


@pytest.mark.parametrize(
    ("options", "rule"), [({"run_eagerly": True}, "compiled"), (None, "compiled"), ({}, "distributed")]
)
def test_models_that_autotune_cannot_measure_are_refused(options, rule):
    def make_model():
        model, optimizer = dense_model(), keras.optimizers.SGD(0.1)
        if RANK < SIZE - 1 or options:
            optimizer = hvdtrain.DistributedOptimizer(optimizer)
        if RANK < SIZE - 1 or options is not None:
            model.compile(optimizer, loss(), **(options or {}))
        return model

    with pytest.raises(JobError, match=rule):
        hvdtrain.autotune(make_model, (SHARD_X[:BATCH], SHARD_Y[:BATCH]))
