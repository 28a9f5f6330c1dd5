"""The trainer on one rank: what happens at which step, what is reported, and its small parts."""

import contextlib
import re
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays, BadSample, Stream
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import JobError, NonFiniteError, StoppedEarly, UsageError
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.optim.distributed_optimizer import is_distributed
from hvdtrain.optim.ema import ema_weights
from hvdtrain.optim.loss_scaling import require_usable_loss_scale
from hvdtrain.training.report import console_of_rank
from hvdtrain.training.step_times import skew

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 5)).astype(np.float32), RNG.integers(0, 3, 70).astype(np.int32)


def make_model(optimizer="sgd", **options) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


class Recorder(Reporter):
    """Records events; the test sets ``trainer``."""

    def __init__(self):
        self.events: list[tuple] = []

    def progressed(self, step, values):
        self.events.append(("progressed", step))
        self.values = values
        assert {"loss", "accuracy", "learning_rate", "gradient_norm", "examples/s", "s/batch"} <= set(values)

    def evaluated(self, step, values):
        self.events.append(("evaluated", step))

    def histograms(self, step, groups):
        self.events.append(("histograms", step))
        self.groups = groups
        weights, gradients = groups["weights"], groups["gradients"]
        assert [weights[path].shape for path in weights] == [gradients[path].shape for path in weights]

    def profile_begins(self):
        self.events.append(("profile begins", self.trainer.step))

    def profile_ends(self):
        self.events.append(("profile ends", self.trainer.step))

    def steps(self, name: str) -> list[int]:
        return [step for event, step in self.events if event == name]


@pytest.mark.parametrize("steps_per_execution", [1, 4, 10, 100])
def test_events_happen_at_their_steps(steps_per_execution):
    recorder = Recorder()
    trainer = make_trainer(
        make_model(),
        Arrays(X, Y),
        Arrays(X, Y),
        batch_size=7,
        steps=33,
        steps_per_execution=steps_per_execution,
        log_every=5,
        eval_every=8,
        histograms_every=12,
        reporter=recorder,
        profile_steps="14:15",
    )
    recorder.trainer = trainer
    summary = trainer.fit()
    assert summary["steps"] == 33
    assert recorder.steps("progressed") == [5, 10, 15, 20, 25, 30, 33]
    assert recorder.steps("evaluated") == [8, 16, 24, 32, 33]
    assert recorder.steps("histograms") == [12, 24]
    # The steps 14 and 15, however many steps a call makes; and at the end of the run.
    assert recorder.steps("profile begins")[0] == 13
    assert recorder.steps("profile ends") == [15, 33]


def test_the_console_reports_by_default_on_rank_0(capsys):
    def fit(**options):
        config = hvdtrain.TrainConfig(batch_size=35, steps=3, logging=hvdtrain.LoggingConfig(log_every=1))
        trainer = hvdtrain.Trainer(make_model(), hvdtrain.data.Data(Arrays(X, Y), Arrays(X, Y)), config, **options)
        with pytest.raises(KeyboardInterrupt) if "callbacks" in options else contextlib.nullcontext():
            trainer.fit()
        return capsys.readouterr().out.splitlines()

    first, second, *lines = fit()
    assert first.startswith("model: sequential")
    assert first.endswith(", 57 parameters, on 1 rank(s)")
    assert second == "global batch: 35 samples, 2 steps per epoch"
    events = [re.match(r"step \d+(  evaluation)?", line[10:])[0] for line in lines if line[2] == ":"]
    assert events == ["step 1", "step 2", "step 2  evaluation", "step 3", "step 3  evaluation"]
    assert any(line.startswith("done: 3 steps on 1 rank(s) in ") for line in lines)
    assert fit(reporter=None) == []
    assert fit(reporter=Reporter()) == []

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    assert len(fit(callbacks=[Interrupt()])) == 2, "the facts, and no line at the end"
    config = hvdtrain.TrainConfig(batch_size=35, steps=3)
    console_of_rank(1, config.logging).progressed(1, {"loss": 1.0})
    assert capsys.readouterr().out == ""


def test_norm_and_copies_are_of_the_last_gradient():
    recorder = Recorder()
    model = make_model(keras.optimizers.SGD(0.0, global_clipnorm=1e-3))
    trainer = make_trainer(model, Arrays(X, Y), batch_size=70, steps=2, histograms_every=1, reporter=recorder)
    recorder.trainer = trainer
    trainer.fit()
    with tf.GradientTape() as tape:
        value = model.loss(Y, model(X))
    gradients = tape.gradient(value, model.trainable_variables)
    norm = float(tf.linalg.global_norm(gradients))
    assert recorder.values["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert recorder.groups["gradients"][variable.path] == pytest.approx(gradient.numpy(), abs=1e-6)


def test_activations_are_those_of_the_layers():
    recorder = Recorder()
    model = keras.Sequential([layers.Input((5,)), layers.Dense(6), layers.Dropout(0.5), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=loss, metrics=["accuracy"])
    trainer = make_trainer(model, Arrays(X, Y), batch_size=70, steps=1, histograms_every=1, reporter=recorder)
    recorder.trainer = trainer
    trainer.fit()
    assert list(recorder.groups["activations"]) == [layer.name for layer in model.layers]
    values = tf.constant(X[:32])
    for layer in model.layers:
        values = layer(values, training=False)
        assert np.allclose(recorder.groups["activations"][layer.name], values, atol=1e-6)


def test_a_model_can_be_trained_twice():
    """Two trainers of one epoch make the updates of one of two epochs."""
    twice, once = make_model("adam"), make_model("adam")
    # The same order in each epoch: one batch holds them all.
    for _ in range(2):
        make_trainer(twice, Arrays(X, Y), batch_size=70, epochs=1, on_nan="skip").fit()
    make_trainer(once, Arrays(X, Y), batch_size=70, epochs=2).fit()
    for a, b in zip(twice.weights, once.weights, strict=True):
        assert a.numpy() == pytest.approx(b.numpy(), abs=1e-6)


class Noting(SingleProcessCollectives):
    """Notes the type and the number of dimensions of each value that is gathered."""

    def __init__(self):
        super().__init__()
        self.gathered: list[tuple] = []

    def allgather(self, value):
        self.gathered.append((type(value), getattr(value, "ndim", 0)))
        return [value]


def test_ranks_with_and_without_steps_of_their_own_make_the_same_calls_at_the_end(tmp_path):
    """A process that joins an elastic job after the last step has made none."""

    def calls_at_the_end(own_steps: int) -> list[tuple]:
        model, collectives = make_model(), Noting()
        checkpointer = hvdtrain.Checkpointer(tmp_path, model, collectives=collectives)
        forget = keras.callbacks.LambdaCallback(on_train_end=lambda logs: collectives.gathered.clear())
        trainer = make_trainer(
            model,
            Arrays(X, Y),
            batch_size=10,
            steps=4,
            callbacks=[forget],
            checkpointer=checkpointer,
            collectives=collectives,
        )
        summary = trainer.fit()
        assert (summary["step_ms"] is not None) == (own_steps > 0)
        assert summary["resumed_from"] == (None if own_steps else 4)
        return collectives.gathered

    assert calls_at_the_end(own_steps=4) == calls_at_the_end(own_steps=0) != []


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_plain_fit_works_after_the_trainer(on_nan):
    """The hooks of the trainer's loop are gone, those of the distributed optimizer stay."""
    model = make_model("adam")
    make_trainer(model, Arrays(X, Y), batch_size=70, epochs=1, on_nan=on_nan).fit()
    before = [each.numpy() for each in model.weights]
    model.fit(X, Y, batch_size=16, verbose=0)
    assert all(np.any(each.numpy() != old) for each, old in zip(model.weights, before, strict=True))
    assert is_distributed(model.optimizer)


def test_a_train_step_that_uses_its_metrics_in_its_own_way():
    """Keras cannot derive the metrics' variables from labels and outputs: the first step creates them."""

    class Autoencoder(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=x, y_pred=self(x, training=True))
            gradients = tape.gradient(self.optimizer.scale_loss(loss), self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return self.compute_metrics(x, x, self(x))

    model = Autoencoder([layers.Input((5,)), layers.Dense(5)])
    model.compile(optimizer="sgd", loss="mse", metrics=[keras.metrics.MeanAbsoluteError(name="error")])
    strange = np.zeros((70, 2, 3), np.float32)
    with pytest.raises(ValueError, match="shape"):
        model._symbolic_build(data_batch=(keras.KerasTensor((None, 5)), keras.KerasTensor((None, 2, 3))))
    summary = make_trainer(model, Arrays(X, strange), batch_size=70, steps=3, log_every=1).fit()
    assert summary["metrics"]["error"] > 0


def test_eager_models_and_custom_train_steps():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {}

    class OwnScaled(Own):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {}

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for eager in (False, True):
        model = Own()
        model(X[:1])
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", run_eagerly=eager)
        # On one rank every step has full weight: nothing is weighted.
        assert make_trainer(model, Arrays(X, Y), batch_size=16, epochs=1).fit()["steps"] == 5
        # With accumulation the last step is cut into micro-batches of other sizes.
        # There are gradients to weigh instead of losses.
        trained = []
        for model_class in (Own, OwnScaled):
            keras.utils.set_random_seed(3)
            model = model_class()
            model(X[:1])
            optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
            model.compile(optimizer=optimizer, loss=loss, run_eagerly=eager)
            make_trainer(model, Arrays(X, Y), batch_size=4, epochs=1, gradient_accumulation_steps=4).fit()
            trained.append([variable.numpy() for variable in model.weights])
        for own, scaled in zip(*trained, strict=True):
            assert own == pytest.approx(scaled, abs=1e-6)


def test_ema_weights_are_exchanged_and_restored():
    model = make_model(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9))
    model.fit(X, Y, verbose=0, epochs=2)
    model.optimizer.finalize_variable_values = None  # fit() has assigned the EMA; continue to train
    model.trainable_variables[0].assign_add(tf.ones((5, 6)))
    own = model.trainable_variables[0].numpy()
    average = model.optimizer._model_variables_moving_average[0].numpy()
    with ema_weights(model):
        assert np.array_equal(model.trainable_variables[0].numpy(), average)
    assert np.array_equal(model.trainable_variables[0].numpy(), own)
    assert np.array_equal(model.optimizer._model_variables_moving_average[0].numpy(), average)


class TwoRanks(SingleProcessCollectives):
    """This rank's values, and those of another."""

    size = 2

    def __init__(self, other):
        self._other = other

    def allgather(self, value):
        return [value, self._other if isinstance(value, set) else value]


def test_a_bad_sample_found_by_two_ranks_counts_once(capfd):
    bad = [BadSample(number=i, where=f"file, record {i}", cause="torn") for i in range(3)]
    quota = BadSampleQuota(2, TwoRanks({"file, record 0", "file, record 1"}))
    quota.note_found(bad[:1])
    assert quota.total() == 2
    assert "skipped file, record 0: torn" in capfd.readouterr().err
    quota = BadSampleQuota(2, TwoRanks({"file, record 1", "file, record 2"}))
    quota.note_found(bad[:1])
    with pytest.raises(JobError, match=r"the number of unreadable samples must be at most 2\. Received: 3") as caught:
        quota.total()
    assert caught.value.exit_code == 65


def test_skew_names_the_slowest_rank():
    ready = np.array([[1.0, 1.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    found = skew(ready, ["a", "b", "c"])
    assert (found["slowest_rank"], found["slowest_host"], found["slowest_share"]) == (1, "b", 0.75)
    assert found["ratio"] == 2.0
    assert found["remedy"]["option"] == "balance=True"  # The hold-up of rank 0 matters less.


def test_a_loss_scale_that_only_falls_means_a_nan():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**-9)
    optimizer.build(make_model().trainable_variables)
    require_usable_loss_scale(optimizer, 7)
    optimizer.dynamic_scale.assign(2.0**-11)
    with pytest.raises(NonFiniteError, match="At step 7 the loss scale has fallen"):
        require_usable_loss_scale(optimizer, 7)


@pytest.mark.parametrize(("initial_scale", "overflows"), [(2.0, False), (2.0**100, True)])
def test_skipped_steps_are_counted_in_steps_not_in_micro_batches(initial_scale, overflows):
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2, dtype="mixed_float16")])
    sgd = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(sgd, initial_scale=initial_scale), loss="mse")
    x = np.ones((36, 3), np.float32)
    summary = make_trainer(model, Arrays(x, x[:, :2]), batch_size=2, steps=9, gradient_accumulation_steps=2).fit()
    assert summary["skipped_steps"] == (9 if overflows else 0)


def test_nan_ends_a_single_rank():
    x = X.copy()
    x[3] = np.nan
    with pytest.raises(NonFiniteError, match="the loss on rank 0 is not finite"):
        make_trainer(make_model(), Arrays(x, Y), batch_size=70, epochs=1).fit()
    summary = make_trainer(make_model(), Arrays(x, Y), batch_size=10, epochs=2, on_nan="skip").fit()
    assert summary["skipped_steps"] == 2


def test_a_model_that_is_not_compiled_is_refused():
    uncompiled = keras.Sequential([layers.Input((5,)), layers.Dense(3)])
    with pytest.raises(UsageError, match="must be compiled with an optimizer"):
        make_trainer(uncompiled, Arrays(X, Y), batch_size=7, epochs=1)


def test_a_model_that_is_not_built_is_built_by_its_first_step():
    unbuilt = keras.Sequential([layers.Dense(3)])
    unbuilt.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    assert make_trainer(unbuilt, Arrays(X, Y), batch_size=16, epochs=1).fit()["steps"] == 5


def test_what_a_step_returns_is_logged_under_its_names():
    class Renaming(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.total = keras.metrics.Mean(name="total_loss")

        @property
        def metrics(self):
            return [self.total]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self.dense(x))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.total.update_state(loss)
            return {"loss": self.total.result(), "largest": tf.reduce_max(self.dense.kernel)}

        def test_step(self, data):
            x, y = data
            self.total.update_state(self.compute_loss(y=y, y_pred=self.dense(x)))
            return {"loss": self.total.result()}

    model = Renaming()
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    logged = {}
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, values: logged.update(values))
    make_trainer(model, Arrays(X, Y), Arrays(X, Y), batch_size=16, epochs=1, callbacks=[callback]).fit()
    assert sorted(logged) == ["largest", "loss", "val_loss"]
    assert logged["largest"] == pytest.approx(float(tf.reduce_max(model.dense.kernel)))
    assert logged["val_loss"] < logged["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nan": "halt"}, "on_nan must be one of stop, skip, ignore. Received: 'halt'"),
        ({"callbacks": ["adam"]}, "callbacks must be Keras callbacks"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        make_trainer(make_model(), Arrays(X, Y), batch_size=7, epochs=1, **options)


@pytest.mark.parametrize(("options", "name"), [({"rescale": True}, "rescale=True"), ({"quorum": 1}, "quorum")])
def test_a_stream_cannot_be_read_from_within_an_epoch_with_other_batches(options, name):
    stream = Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    with pytest.raises(UsageError, match=rf"{name} excludes a tf\.data\.Dataset"):
        make_trainer(make_model(), stream, batch_size=7, epochs=1, **options)


def test_a_stop_request_is_received_while_a_rank_waits_for_input():
    """The step that waits is completed, and no other: its ranks are in a reduction already."""
    flows, noted = threading.Event(), {}
    flows.set()

    def wait(x):
        assert flows.wait(20)
        return x

    def blocked(x, y):
        x = tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), (5,))
        return x, y

    class Block(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                flows.clear()
                threading.Thread(target=ask_and_release).start()

    def ask_and_release():
        while noted.get("step") != trainer.step:  # What was read ahead is used up.
            noted["step"] = trainer.step
            time.sleep(0.5)
        watch.request_stop("asked")
        time.sleep(0.5)
        noted["received"], noted["step then"] = watch.stop_requested, trainer.step
        flows.set()

    with hvdtrain.JobWatch() as watch:
        data = Stream(tf.data.Dataset.from_tensor_slices((X, Y)), transform=blocked)
        trainer = make_trainer(make_model(), data, batch_size=7, epochs=10, callbacks=[Block()], job_watch=watch)
        with pytest.raises(StoppedEarly):
            trainer.fit()
    assert noted["received"]
    assert noted["step then"] == noted["step"] < 100
    assert trainer.step == noted["step"] + 1


def test_a_train_step_that_applies_no_gradients_is_refused():
    class Idle(keras.Sequential):
        def train_step(self, data):
            return {"loss": self.compute_loss(y=data[1], y_pred=self(data[0]))}

    model = Idle([layers.Input((5,)), layers.Dense(3)])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    with pytest.raises(UsageError, match=r"train_step must apply gradients by an optimizer.*Idle\.train_step"):
        make_trainer(model, Arrays(X, Y), batch_size=16, epochs=1).fit()
