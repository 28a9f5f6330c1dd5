"""On all ranks: model.fit with DistributedOptimizer and hvdtrain.callbacks.distributed."""

import copy
import csv
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_programs import (
    BATCH,
    COLLECTIVES,
    RANK,
    SHARD_X,
    SHARD_Y,
    SIZE,
    TEST_SHARD,
    TEST_X,
    TEST_Y,
    X,
    Y,
    assert_same_on_all_ranks,
    compiled,
    digests,
    fit,
)
from keras import layers
from models import NUM_CLASSES, dense_model, loss, relative_difference, values

import hvdtrain
from hvdtrain.callbacks import (
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    distributed,
)
from hvdtrain.errors import DisagreementError, DivergenceError, JobError, UsageError
from hvdtrain.training import own_tuning, step_trials


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


def test_copied_callbacks_work_as_the_originals():
    """KerasTuner copies those of each trial."""
    callbacks = [*distributed([keras.callbacks.EarlyStopping("loss")]), MetricAverageCallback()]
    models, histories = zip(fit(copy.deepcopy(callbacks)), fit(callbacks), strict=True)
    assert histories[0] == histories[1]
    assert digests(models[0]) == digests(models[1])
    assert_same_on_all_ranks(histories)


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


def tracking_callback(module: str) -> Recorder:
    """As if it were one of that module of a package."""
    return type("Tracking", (Recorder,), {"__module__": module})()


def test_callbacks_of_unknown_packages_decide(folder):
    if SIZE > 1:
        with pytest.raises(
            DisagreementError, match=r"those that decide.*Set only_on_rank_zero = True on one of your own"
        ):
            fit(distributed([tracking_callback("tracking.of_ones_own")] if RANK == 0 else []))


def test_writers_may_be_given_to_rank_0_alone(folder):
    """As in every example of Horovod: if hvd.rank() == 0: callbacks.append(…)."""
    writers = [keras.callbacks.ModelCheckpoint(folder / "a.keras"), keras.callbacks.CSVLogger(folder / "a.csv")]
    fit(distributed(writers if RANK == 0 else []))
    fit([keras.callbacks.ModelCheckpoint(folder / "b.keras")] if RANK == 0 else [])
    own = keras.callbacks.ModelCheckpoint(folder / f"rank{RANK}.keras")
    fit([own])
    tracker = tracking_callback("wandb.integration.keras.callbacks.metrics_logger")
    fit(distributed([tracker] if RANK == 0 else []))
    fit(distributed([tracker]))
    assert len(tracker.epochs) == (8 if RANK == 0 else 0)
    fit([tracker] if RANK == 0 else [])
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
    with pytest.raises(UsageError, match=r"(?i)sgd.*, which averages nothing over ranks"):
        fit(distributed(), plain)
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(UsageError, match="CosineDecay"):
        fit(distributed([LearningRateWarmupCallback(0.1)]), compiled(keras.optimizers.SGD(rate)))


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
