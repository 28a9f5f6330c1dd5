"""On every rank: Keras' callbacks, metrics and evaluation see what one process would see, and write once."""

import csv
import inspect
import time

import keras
import numpy as np
import pytest
from keras import layers
from models import NUM_CLASSES, loss, samples, values

import hvdtrain
from hvdtrain import runtime
from hvdtrain.data import Arrays
from hvdtrain.errors import DisagreementError, DivergenceError, UsageError
from hvdtrain.metrics import reduced_results

TOPOLOGY = hvdtrain.init(seed=0)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
X, Y = samples(97, seed=1)
TEST_X, TEST_Y = samples(53, seed=2)
STEPS_PER_EPOCH = -(-97 // (8 * SIZE))


def compiled(optimizer=None, **options) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(NUM_CLASSES)]
    )
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss=loss(), metrics=["accuracy"], **options)
    return model


def fit(callbacks, model=None, *, epochs=4, **options) -> tuple[keras.Model, dict]:
    model = model or compiled()
    arguments = {"batch_size": 8, "epochs": epochs, "callbacks": callbacks, **options}
    trainer = hvdtrain.Trainer(model, Arrays(X, Y), Arrays(TEST_X, TEST_Y), **arguments)
    return model, trainer.fit()


def same_everywhere(value) -> None:
    everyone = COLLECTIVES.allgather(value)
    assert all(each == everyone[0] for each in everyone), everyone


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs: list[dict] = []
        self.batches: list[tuple[int, dict]] = []
        self.tests = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((batch, dict(logs)))

    def on_test_end(self, logs=None):
        self.tests += 1


def test_values_are_those_of_all_ranks_and_the_same_everywhere():
    recorder = Recorder()
    model, summary = fit([recorder], epochs=3)
    same_everywhere(recorder.epochs)
    same_everywhere(recorder.batches)
    assert [sorted(each) for each in recorder.epochs] == [["accuracy", "loss", "val_accuracy", "val_loss"]] * 3
    assert [batch for batch, _ in recorder.batches] == list(range(STEPS_PER_EPOCH)) * 3
    assert recorder.tests == 3
    expected = {k: float(v) for k, v in model.evaluate(TEST_X, TEST_Y, verbose=0, return_dict=True).items()}
    assert summary["eval"] == pytest.approx(expected, rel=1e-5)
    assert recorder.epochs[-1]["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert model.history.history["loss"] == [each["loss"] for each in recorder.epochs]


def test_the_mean_loss_of_an_epoch_is_exact():
    """With a learning rate of 0 nothing changes: the epoch's means are those of one evaluation, remainder included."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(NUM_CLASSES)])
    l2 = keras.regularizers.L2(0.1)
    model.layers[0].kernel_regularizer = l2
    model.compile(
        optimizer=keras.optimizers.SGD(0.0),
        loss=loss(),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
    )
    for count in (97, 8 * SIZE + 1):
        recorder = Recorder()
        x, y = X[:count], Y[:count]
        weights = np.linspace(0.5, 2, count).astype(np.float32)
        trainer = hvdtrain.Trainer(
            model, Arrays(x, y, weights), batch_size=8, epochs=1, callbacks=[recorder], on_nan="stop"
        )
        trainer.fit()
        expected = model.evaluate(x, y, sample_weight=weights, batch_size=count, verbose=0, return_dict=True)
        assert recorder.epochs[0] == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)


def test_early_stopping_stops_every_rank_at_the_same_epoch_and_restores():
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True, mode="max")
    model, summary = fit([stopping], epochs=9)
    assert summary["steps"] < 9 * STEPS_PER_EPOCH
    same_everywhere((stopping.stopped_epoch, stopping.best, summary["steps"], summary["weights_sha256"]))
    best = model.evaluate(TEST_X, TEST_Y, verbose=0, return_dict=True)
    assert float(best["loss"]) == pytest.approx(stopping.best, rel=1e-4)


def test_rates_are_reduced_and_scheduled_alike():
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", mode="max", factor=0.5, patience=1, min_delta=10)
    model, _ = fit([plateau], epochs=4)
    assert float(model.optimizer.learning_rate) < 0.1
    same_everywhere(float(model.optimizer.learning_rate))
    model, _ = fit([keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)], epochs=3)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 8)
    same_everywhere([v.tobytes() for v in values(model.weights)])


def test_writers_write_on_rank_0_alone(folder):
    written: list[str] = []

    class Writes(keras.callbacks.Callback):
        only_on_rank_zero = True

        def on_epoch_end(self, epoch, logs=None):
            written.append(str(epoch))

    callbacks = [
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        keras.callbacks.ModelCheckpoint(folder / "best-{epoch}.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "batch-{batch}.weights.h5", save_weights_only=True, save_freq=3),
        keras.callbacks.TensorBoard(folder / "tensorboard", histogram_freq=1, update_freq=2),
        Writes(),
    ]
    model, summary = fit(callbacks, epochs=2, steps_per_call=2)
    COLLECTIVES.barrier()
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[-1]["val_loss"]) == pytest.approx(summary["eval"]["loss"], rel=1e-6)
    assert written == (["0", "1"] if RANK == 0 else [])
    names = {path.name for path in folder.iterdir()}
    saved_at = {f"batch-{(step - 1) % STEPS_PER_EPOCH + 1}.weights.h5" for step in range(3, 2 * STEPS_PER_EPOCH, 3)}
    if "_last_batch_seen = None" in inspect.getsource(keras.callbacks.ModelCheckpoint):
        assert saved_at <= names
    else:  # Keras 3.12 counts one batch too few
        assert any(name.startswith("batch-") for name in names)
    assert len(list((folder / "tensorboard").rglob("events.*"))) == 2
    saved = max(folder.glob("best-*.keras"), key=lambda path: path.name)
    loaded = keras.models.load_model(saved)
    if saved.name == "best-2.keras":
        assert [v.tobytes() for v in values(loaded.weights)] == [v.tobytes() for v in values(model.weights)]


def test_statistics_in_a_checkpoint_in_the_middle_of_an_epoch_are_those_of_all_ranks(folder):
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                seen.append(self.model.layers[1].moving_mean.numpy().tobytes())

    path = folder / "two.weights.h5"
    fit([Looks(), keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)], epochs=1, check_every=0)
    same_everywhere(seen)


def test_statistics_at_the_end_of_an_epoch_are_those_of_all_ranks():
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.layers[1].moving_mean.numpy().tobytes())

    # Without an evaluation, which would share them.
    hvdtrain.Trainer(compiled(), Arrays(X, Y), batch_size=8, epochs=2, callbacks=[Looks()], check_every=0).fit()
    assert len(seen) == 2
    same_everywhere(seen)


@pytest.mark.parametrize("rank", range(SIZE))
def test_terminate_on_nan_ends_all_ranks(rank):
    """The bad sample is one rank's alone; the callback takes the place of the error."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([0, 0])).permutation(len(X))
    x[order[2 * 8 * SIZE + rank * 8]] = np.nan
    model = compiled()
    recorder = Recorder()
    trainer = hvdtrain.Trainer(
        model, Arrays(x, Y), batch_size=8, epochs=4, callbacks=[recorder, keras.callbacks.TerminateOnNaN()]
    )
    summary = trainer.fit()
    assert summary["steps"] == 3
    assert np.isnan(recorder.batches[-1][1]["loss"])


def test_a_changed_weight_is_found_within_the_stated_number_of_steps():
    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == SIZE - 1 and batch == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 1e-6)

    with pytest.raises(DivergenceError, match=rf"At step 3 variable '.*dense.*' of rank {SIZE - 1} differs"):
        fit([Breaks()], check_every=3)


def test_one_ranks_wish_to_stop_stops_all():
    """A callback that looks at a clock of its own, as a rank's time limit does."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == SIZE - 1 and batch == 2:
                self.model.stop_training = True

    _, summary = fit([Stops()], epochs=3)
    assert summary["steps"] == 3
    same_everywhere(summary["steps"])

    class StopsAtEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0 and epoch == 1:
                self.model.stop_training = True

    _, summary = fit([StopsAtEpoch()], epochs=5)
    assert summary["epochs"] == 2


def test_lambda_callback_hears_every_call():
    heard: list[str] = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: heard.append(f"epoch {epoch}"),
        on_train_batch_end=lambda batch, logs: heard.append(f"batch {batch}"),
        on_train_end=lambda logs: heard.append("end"),
    )
    fit([callback], epochs=1, steps_per_call=2)
    last_of_calls = sorted({*range(1, STEPS_PER_EPOCH, 2), STEPS_PER_EPOCH - 1})
    assert heard == ["epoch 0", *(f"batch {batch}" for batch in last_of_calls), "end"]


def test_swap_ema_weights_evaluates_and_saves_the_average(folder):
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    path = folder / "ema.keras"
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(path, monitor="val_loss"),
    ]
    model, summary = fit(callbacks, compiled(optimizer), epochs=2)
    COLLECTIVES.barrier()
    loaded = keras.models.load_model(path)
    expected = loaded.evaluate(TEST_X, TEST_Y, verbose=0, return_dict=True)
    assert summary["eval"]["loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    same_everywhere([v.tobytes() for v in values(model.weights)])


def test_the_average_of_weights_is_evaluated_and_left_in_the_model(folder):
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    path = folder / "average.keras"
    model, summary = fit([keras.callbacks.ModelCheckpoint(path)], compiled(optimizer), epochs=2)
    COLLECTIVES.barrier()
    for each in (model, keras.models.load_model(path)):
        results = each.evaluate(TEST_X, TEST_Y, verbose=0, return_dict=True)
        assert summary["eval"]["loss"] == pytest.approx(float(results["loss"]), rel=1e-5)
    plain, _ = fit([], compiled(keras.optimizers.SGD(0.1)), epochs=2)
    assert not np.array_equal(plain.weights[0].numpy(), model.weights[0].numpy())


def test_callbacks_that_cannot_work_are_refused(folder):
    with pytest.raises(UsageError, match="BackupAndRestore"):
        fit([keras.callbacks.BackupAndRestore(folder / "backup")])
    with pytest.raises(UsageError, match=r"must be Keras callbacks\. Received: 'adam'"):
        fit(["adam"])
    with pytest.raises(DisagreementError, match="callbacks"):
        fit([keras.callbacks.TerminateOnNaN()] if RANK == 0 else [])


def shipped_metrics() -> list[str]:
    """Every metric that Keras ships whose value is a number, or several."""
    skipped = {"Metric", "MeanMetricWrapper"}
    members = vars(keras.metrics).items()
    return sorted(
        name
        for name, member in members
        if isinstance(member, type) and issubclass(member, keras.metrics.Metric) and name not in skipped
    )


ARGUMENTS = {
    **dict.fromkeys(("PrecisionAtRecall", "RecallAtPrecision"), (0.5,)),
    **dict.fromkeys(("SensitivityAtSpecificity", "SpecificityAtSensitivity"), (0.5,)),
    "IoU": (2, [0, 1]),
    "BinaryIoU": ([0, 1],),
    "MeanIoU": (2,),
    "OneHotIoU": (3, [0, 1]),
    "OneHotMeanIoU": (3,),
}
# Their value is a mean over batches of something that is not a mean over samples: it depends on how
# samples were cut into batches, on one process too.
OF_BATCHES = {"PearsonCorrelation", "ConcordanceCorrelation"}


@pytest.mark.parametrize("name", shipped_metrics())
def test_metric_over_uneven_shards(name):
    """Rank 0 has three samples, the others the rest."""
    if name in OF_BATCHES:
        pytest.skip("depends on the cut into batches on one process too")
    metric = getattr(keras.metrics, name)(*ARGUMENTS.get(name, ()))
    rng = np.random.default_rng(0)
    count = 61
    if name.startswith("Sparse"):
        y, p = rng.integers(0, 3, count).astype(np.float32), rng.dirichlet(np.ones(3), count).astype(np.float32)
    elif name.startswith(("Categorical", "OneHot", "F", "TopK", "KL")):
        y = np.eye(3, dtype=np.float32)[rng.integers(0, 3, count)]
        p = rng.dirichlet(np.ones(3), count).astype(np.float32)
    elif name in ("IoU", "MeanIoU"):
        y, p = rng.integers(0, 2, (2, count)).astype(np.float32)
    else:
        y, p = (rng.random((count, 1)) > 0.5).astype(np.float32), rng.random((count, 1)).astype(np.float32)
    cuts = [0, 3, *np.linspace(3, count, SIZE).astype(int)[1:]]

    class Holder:
        """What reduced_results asks of a model."""

        metrics = (metric,)

        def get_metrics_result(self):
            return {"value": metric.result()}

    def update(part):
        batch = (y[part],) if name in ("Mean", "Sum") else (y[part], p[part])
        metric.update_state(*batch)

    update(slice(cuts[RANK], cuts[RANK + 1]))
    if np.ndim(metric.result()) or isinstance(metric.result(), dict):
        reduced = None
        totals = COLLECTIVES.sum([variable.numpy() for variable in metric.variables])
    else:
        reduced = reduced_results(Holder(), COLLECTIVES)["value"]
        totals = None
    metric.reset_state()
    update(slice(None))
    if reduced is None:
        for total, variable in zip(totals, metric.variables, strict=True):
            assert total == pytest.approx(variable.numpy(), rel=1e-5)
    else:
        assert reduced == pytest.approx(float(metric.result()), rel=1e-5)


def test_a_metric_that_is_no_sum_is_refused():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(initializer=keras.initializers.Constant(-np.inf), name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value

        def reset_state(self):
            self.value.assign(-np.inf)

    for evaluation in (Arrays(TEST_X, TEST_Y), None):
        model = compiled()
        model.compile(optimizer="sgd", loss=loss(), metrics=[Largest()])
        with pytest.raises(UsageError, match="largest"):
            hvdtrain.Trainer(model, Arrays(X, Y), evaluation, batch_size=8, epochs=2).fit()


def test_ranks_are_told_apart_by_their_speed():
    class Slow(keras.layers.Layer):
        def call(self, inputs):
            import tensorflow as tf

            def wait(x):
                time.sleep(0.005 if RANK == SIZE - 1 else 0)
                return x

            outputs = tf.numpy_function(wait, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return inputs + tf.stop_gradient(outputs - inputs)

    keras.utils.set_random_seed(7)
    model = keras.Sequential([layers.Input((6,)), Slow(), layers.Dense(NUM_CLASSES)])
    model.compile(optimizer="sgd", loss=loss())
    trainer = hvdtrain.Trainer(model, Arrays(X, Y), batch_size=4, steps=30)
    summary = trainer.fit()
    same_everywhere(summary["skew"])
    assert summary["skew"]["slowest_rank"] == SIZE - 1
    assert summary["skew"]["slowest_share"] > 0.6
    # Those that are not slow wait for the one that is.
    waited_s = np.median(np.concatenate(trainer._mode._shares.all_steps, axis=1)[:, :, 2], axis=1)
    assert waited_s[: SIZE - 1].min() > 0.002
    assert 0 <= summary["communication_fraction"] <= 1
    shares = [summary[f"{part}_fraction"] for part in ("input", "compute", "communication")]
    assert sum(shares) == pytest.approx(1, abs=0.01) or summary["compute_fraction"] == 0
