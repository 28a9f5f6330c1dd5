"""The trainer on one rank: which step things happen at, what is told, and its small parts by themselves."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.collectives import OneProcess
from hvdtrain.data import Arrays, BadSample, Stream
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.errors import NonFiniteError, StoppedEarly, UsageError
from hvdtrain.failure import JobError
from hvdtrain.loss_scale import require_usable_loss_scale
from hvdtrain.report import Reporter
from hvdtrain.timing.profiler import Profiler
from hvdtrain.timing.step_times import skew
from hvdtrain.weight_average import averaged_weights

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 5)).astype(np.float32), RNG.integers(0, 3, 70).astype(np.int32)


def make_model(optimizer="sgd", **options) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


class Told(Reporter):
    def __init__(self):
        self.events: list[tuple] = []

    def progressed(self, step, values):
        self.events.append(("progressed", step))
        assert {"loss", "accuracy", "learning_rate", "gradient_norm", "examples/s", "s/batch"} <= set(values)

    def evaluated(self, step, values):
        self.events.append(("evaluated", step))

    def histograms(self, step, groups):
        self.events.append(("histograms", step))
        self.groups = groups
        weights, gradients = groups["weights"], groups["gradients"]
        assert [weights[path].shape for path in weights] == [gradients[path].shape for path in weights]

    def steps(self, name: str) -> list[int]:
        return [step for event, step in self.events if event == name]


@pytest.mark.parametrize("steps_per_call", [1, 4, 10, 100])
def test_things_happen_at_the_steps_asked_for(steps_per_call):
    told = Told()
    profiled = []

    class Marks(Profiler):
        def before(self, step):
            profiled.append(step)

    trainer = hvdtrain.Trainer(
        make_model(),
        Arrays(X, Y),
        Arrays(X, Y),
        batch_size=7,
        steps=33,
        steps_per_call=steps_per_call,
        log_every=5,
        eval_every=8,
        histograms_every=12,
        reporter=told,
        profiler=Marks(14, 15),
    )
    summary = trainer.fit()
    assert summary["steps"] == 33
    assert told.steps("progressed") == [5, 10, 15, 20, 25, 30, 33]
    assert told.steps("evaluated") == [8, 16, 24, 32, 33]
    assert told.steps("histograms") == [12, 24]
    assert {13, 15} <= set(profiled)


def test_the_norm_and_the_copies_are_of_the_last_gradient():
    told = Told()
    model = make_model(keras.optimizers.SGD(0.0, global_clipnorm=1e-3))
    trainer = hvdtrain.Trainer(model, Arrays(X, Y), batch_size=70, steps=2, histograms_every=1, reporter=told)
    trainer.fit()
    with tf.GradientTape() as tape:
        value = model.loss(Y, model(X))
    gradients = tape.gradient(value, model.trainable_variables)
    assert trainer._gradients.norm() == pytest.approx(float(tf.linalg.global_norm(gradients)), rel=1e-5)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert told.groups["gradients"][variable.path] == pytest.approx(gradient.numpy(), abs=1e-6)


def test_activations_are_those_of_the_layers():
    told = Told()
    model = keras.Sequential([layers.Input((5,)), layers.Dense(6), layers.Dropout(0.5), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=loss, metrics=["accuracy"])
    hvdtrain.Trainer(model, Arrays(X, Y), batch_size=70, steps=1, histograms_every=1, reporter=told).fit()
    assert list(told.groups["activations"]) == [layer.name for layer in model.layers]
    values = tf.constant(X[:32])
    for layer in model.layers:
        values = layer(values, training=False)
        assert np.allclose(told.groups["activations"][layer.name], values, atol=1e-6)


def test_a_model_can_be_trained_twice():
    """The second trainer's hooks replace the first's: an epoch after an epoch is two epochs."""
    twice, once = make_model("adam"), make_model("adam")

    def fail(*_):
        raise AssertionError("the first trainer's hook was called")

    # The same order in each epoch: one batch holds them all.
    for _ in range(2):
        trainer = hvdtrain.Trainer(twice, Arrays(X, Y), batch_size=70, epochs=1, on_nan="skip")
        trainer.fit()
        trainer._gradients.poison = fail
    hvdtrain.Trainer(once, Arrays(X, Y), batch_size=70, epochs=2).fit()
    for a, b in zip(twice.weights, once.weights, strict=True):
        assert a.numpy() == pytest.approx(b.numpy(), abs=1e-6)


def test_a_step_that_uses_its_metrics_in_a_way_of_its_own():
    """Keras cannot make the metrics' variables beforehand from labels and outputs: the first step makes them."""

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
    summary = hvdtrain.Trainer(model, Arrays(X, strange), batch_size=70, steps=3, log_every=1).fit()
    assert summary["metrics"]["error"] > 0


def test_eager_models_and_steps_of_the_users_own():
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

    for eager in (False, True):
        model = Own()
        model(X[:1])
        model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", run_eagerly=eager)
        # On one rank every step counts in full: nothing has to be weighted.
        assert hvdtrain.Trainer(model, Arrays(X, Y), batch_size=16, epochs=1).fit()["steps"] == 5
        # With accumulation the last step is cut into parts of other sizes.
        model = Own()
        model(X[:1])
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", run_eagerly=eager)
        with pytest.raises(UsageError, match=r"must call self\.optimizer\.scale_loss"):
            hvdtrain.Trainer(model, Arrays(X, Y), batch_size=4, epochs=1, accumulate=4).fit()


def test_averaged_weights_come_and_go():
    model = make_model(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9))
    model.fit(X, Y, verbose=0, epochs=2)
    model.optimizer.finalize_variable_values = None  # fit() has put the average in place; train on
    model.trainable_variables[0].assign_add(tf.ones((5, 6)))
    own = model.trainable_variables[0].numpy()
    average = model.optimizer._model_variables_moving_average[0].numpy()
    with averaged_weights(model.optimizer):
        assert np.array_equal(model.trainable_variables[0].numpy(), average)
    assert np.array_equal(model.trainable_variables[0].numpy(), own)
    assert np.array_equal(model.optimizer._model_variables_moving_average[0].numpy(), average)


class TwoRanks(OneProcess):
    """This rank's values, and another's."""

    size = 2

    def __init__(self, other):
        self._other = other

    def allgather(self, value):
        return [value, self._other if isinstance(value, set) else value]


def test_a_bad_sample_that_two_ranks_meet_counts_once(capfd):
    bad = [BadSample(number=i, where=f"file, record {i}", cause="torn") for i in range(3)]
    quota = BadSampleQuota(2, TwoRanks({"file, record 0", "file, record 1"}))
    quota.note_found(bad[:1])
    assert quota.total() == 2
    assert "left out file, record 0: torn" in capfd.readouterr().err
    quota = BadSampleQuota(2, TwoRanks({"file, record 1", "file, record 2"}))
    quota.note_found(bad[:1])
    with pytest.raises(JobError, match=r"at most 2 samples may be unreadable\. Received: 3") as caught:
        quota.total()
    assert caught.value.exit_code == 65


def test_skew_names_the_rank_that_is_last():
    ready = np.array([[1.0, 1.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    told = skew(ready, ["a", "b", "c"])
    assert (told["slowest_rank"], told["slowest_host"], told["slowest_share"]) == (1, "b", 0.75)
    assert told["ratio"] == 2.0


def test_a_loss_scale_that_only_falls_is_a_nan():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**-9)
    optimizer.build(make_model().trainable_variables)
    require_usable_loss_scale(optimizer, 7)
    optimizer.dynamic_scale.assign(2.0**-11)
    with pytest.raises(NonFiniteError, match="At step 7 the loss scale has fallen"):
        require_usable_loss_scale(optimizer, 7)


def test_nan_ends_one_rank_too():
    x = X.copy()
    x[3] = np.nan
    with pytest.raises(NonFiniteError, match="the loss on rank 0 is not finite"):
        hvdtrain.Trainer(make_model(), Arrays(x, Y), batch_size=70, epochs=1).fit()
    summary = hvdtrain.Trainer(make_model(), Arrays(x, Y), batch_size=10, epochs=2, on_nan="skip").fit()
    assert summary["skipped_steps"] == 2


def test_a_model_that_is_not_ready_is_refused():
    unbuilt = keras.Sequential([layers.Dense(3)])
    unbuilt.compile(optimizer="sgd", loss="mse")
    uncompiled = keras.Sequential([layers.Input((5,)), layers.Dense(3)])
    for model in (unbuilt, uncompiled):
        with pytest.raises(UsageError, match="must be built and compiled with an optimizer"):
            hvdtrain.Trainer(model, Arrays(X, Y), batch_size=7, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nan": "halt"}, "on_nan must be one of stop, skip, ignore. Received: 'halt'"),
        ({"callbacks": ["adam"]}, "callbacks must be Keras callbacks"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        hvdtrain.Trainer(make_model(), Arrays(X, Y), batch_size=7, epochs=1, **options)
    with pytest.raises(UsageError, match="1 <= first step <= last step"):
        Profiler(3, 2)


def test_a_stop_is_heard_while_a_rank_waits_for_input():
    """The step that waits is made, and no other: its ranks are in a reduction already."""
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
        noted["heard"], noted["step then"] = watch.stop_is_coming, trainer.step
        flows.set()

    with hvdtrain.JobWatch() as watch:
        data = Stream(tf.data.Dataset.from_tensor_slices((X, Y)), transform=blocked)
        trainer = hvdtrain.Trainer(make_model(), data, batch_size=7, epochs=10, callbacks=[Block()], watch=watch)
        with pytest.raises(StoppedEarly):
            trainer.fit()
    assert noted["heard"]
    assert noted["step then"] == noted["step"] < 100
    assert trainer.step == noted["step"] + 1
