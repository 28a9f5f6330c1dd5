"""Steps that XLA compiles, as a whole or up to the gradients: the same updates, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer, train_config

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import bounded_messages, runtime
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import devices
from hvdtrain.training import xla
from hvdtrain.training.step_runner import StepRunner

hvdtrain.init()
RNG = np.random.default_rng(0)
TOKENS, LABELS = RNG.integers(0, 50, (70, 8)).astype(np.int32), RNG.integers(0, 3, 70).astype(np.int32)


class AsksPython(layers.Layer):
    """Asks Python, which XLA cannot."""

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda value: value, [x], x.dtype), x.shape)


class AppliesTwice(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class TwoOptimizers(keras.Model):
    def compile(self, **options):
        super().compile(**options)
        self.other_optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        first, *others = zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(others)
        self.other_optimizer.apply_gradients([first])
        return {"loss": loss}


def make_model(optimizer=None, *, model_class=keras.Model, more=list) -> keras.Model:
    keras.utils.set_random_seed(3)
    tokens = layers.Input((8,), dtype="int32")
    x = layers.LSTM(6)(layers.Embedding(50, 4)(tokens))
    for layer in [layers.BatchNormalization(), *more()]:
        x = layer(x)
    model = model_class(tokens, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def trained(model, labels=LABELS, **options):
    """An epoch of 70 samples: the last batch is short."""
    summary = make_trainer(model, Arrays(TOKENS, labels), **{"batch_size": 16, "epochs": 2, **options}).fit()
    return model, summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (lambda: keras.optimizers.Adam(0.01), {}),
        (
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
            {"gradient_accumulation_steps": 2},
        ),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), {"steps_per_execution": 3}),
    ],
)
def test_the_same_updates_as_without(make_optimizer, options):
    plain, expected = trained(make_model(make_optimizer()), jit_compile=False, **options)
    ours, found = trained(make_model(make_optimizer()), jit_compile=True, **options)
    for ours_each, plain_each in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours_each, plain_each, atol=2e-4)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert found["metrics"]["accuracy"] == pytest.approx(expected["metrics"]["accuracy"], abs=0.02)


def test_a_loss_that_is_not_finite_is_found():
    model = make_model()
    model.get_layer(index=-1).kernel.assign(np.full((6, 3), np.nan))
    with pytest.raises(NonFiniteError, match="At step 1: the loss on rank 0 is not finite"):
        trained(model, jit_compile=True)


@tf.custom_gradient
def with_gradient_of_nan(x, is_bad):
    return tf.identity(x), lambda upstream: (tf.where(is_bad, np.nan, upstream), None)


class BadAtStep(layers.Dense):
    """A layer whose kernel has a gradient of NaN at one step."""

    def __init__(self, bad_step):
        super().__init__(6)
        self.bad_step = bad_step

    def build(self, shape):
        super().build(shape)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.steps.assign_add(1)
        return x @ with_gradient_of_nan(self.kernel.value, self.steps == self.bad_step)


def values_of(model):
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return {variable.path: np.array(variable) for variable in variables}


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.long)])
def test_nothing_is_updated_from_a_bad_step_on(steps_per_execution):
    options = {"epochs": None, "jit_compile": True, "steps_per_execution": steps_per_execution}
    good, _ = trained(make_model(more=lambda: [BadAtStep(3)]), steps=2, **options)
    bad = make_model(more=lambda: [BadAtStep(3)])
    culprit = "the gradient of 'bad_at_step[_0-9]*/kernel' on rank 0 is not finite"
    with pytest.raises(NonFiniteError, match=f"At step 3: {culprit}. Nothing was updated"):
        trained(bad, steps=8, **options)
    for expected, found in zip(values_of(good).values(), values_of(bad).values(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_bad_step_is_skipped():
    options = {"epochs": None, "steps": 8, "on_nan": "skip"}
    plain, expected = trained(make_model(more=lambda: [BadAtStep(3)]), jit_compile=False, **options)
    ours, found = trained(make_model(more=lambda: [BadAtStep(3)]), jit_compile=True, **options)
    assert found["skipped_steps"] == expected["skipped_steps"] == 1
    for ours_each, plain_each in zip(values_of(ours).values(), values_of(plain).values(), strict=True):
        np.testing.assert_allclose(ours_each, plain_each, atol=2e-4)


@pytest.mark.slow
def test_a_skipped_step_leaves_no_trace_in_statistics():
    model = make_model()
    model.get_layer(index=-1).kernel.assign(np.full((6, 3), np.nan))
    embedding = model.get_layer(index=1).embeddings
    embedding.assign(tf.where(tf.range(50)[:, None] < 25, embedding, np.nan))
    _, found = trained(model, jit_compile=True, on_nan="skip", epochs=1)
    assert found["skipped_steps"] == found["steps"]
    statistics = [v for layer in model.layers for v in layer.non_trainable_weights]
    assert len(statistics) == 2
    assert all(np.isfinite(each.numpy()).all() for each in statistics)


@pytest.mark.slow
def test_large_sparse_gradients_are_updated_without_xla(monkeypatch):
    expected, _ = trained(make_model(), jit_compile=True)
    monkeypatch.setattr(bounded_messages, "PIECE_BYTES", 50)
    made_dense = []
    monkeypatch.setattr(xla, "unreduced", lambda gradients: made_dense.append(gradients))
    found, _ = trained(make_model(), jit_compile=True)
    assert not made_dense
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.slow
def test_what_xla_cannot_compile_is_trained_without_it_by_default(monkeypatch):
    expected, _ = trained(make_model(more=lambda: [AsksPython()]), jit_compile=False)
    with pytest.raises(UsageError, match=r"XLA cannot compile this model: .*PyFunc.*Set jit_compile=False"):
        trained(make_model(more=lambda: [AsksPython()]), jit_compile=True)
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    model = make_model(more=lambda: [AsksPython()])
    model.jit_compile = True  # as Keras chooses on a GPU
    found, _ = trained(model)
    for a, b in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_class": AppliesTwice}, "must apply gradients once. Received: AppliesTwice.train_step, which does 2"),
        ({"model_class": TwoOptimizers}, "jit_compile=True excludes a model with several optimizers"),
    ],
)
def test_what_cannot_be_divided(options, message):
    with pytest.raises(UsageError, match=message):
        # Histograms need the gradients.
        trained(make_model(**options), jit_compile=True, histograms_every=1)
    trained(make_model(**options), jit_compile=False)


@pytest.mark.slow
def test_a_train_step_that_applies_twice_is_compiled_as_a_whole():
    plain, _ = trained(make_model(model_class=AppliesTwice), jit_compile=False)
    ours, _ = trained(make_model(model_class=AppliesTwice), jit_compile=True)
    for ours_each, plain_each in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours_each, plain_each, atol=2e-4)


SYNCHRONIZED = {"more": lambda: [layers.BatchNormalization(synchronized=True)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_gpu", "by_keras", "model_options", "options", "is_compiled"),
    [
        (True, True, {}, {}, True),
        (False, True, {}, {}, False),  # on a CPU, only if it is asked for
        (True, False, {}, {}, False),  # model.compile(jit_compile=False)
        (True, True, {}, {"jit_compile": False}, False),
        (False, False, {}, {"jit_compile": True}, True),
        (True, True, SYNCHRONIZED, {}, False),
        (True, True, {}, {"sync_batchnorm": True}, False),
        (True, True, {}, {"balance": True}, False),
        (True, True, {"model_class": AppliesTwice}, {}, False),
    ],
)
def test_on_a_gpu_keras_chooses(has_gpu, by_keras, model_options, options, is_compiled, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: has_gpu)

    def made() -> keras.Model:
        model = make_model(**model_options)
        model.jit_compile = by_keras
        return model

    source, options = Arrays(TOKENS, LABELS), {"batch_size": 16, "epochs": 1, **options}
    collectives = runtime.collectives()
    runner = StepRunner(
        made(), source, train_config(**options), collectives=collectives, job_watch=JobWatch(collectives)
    )
    assert runner.config.jit_compile == is_compiled
    if is_compiled:
        assert np.isfinite(make_trainer(made(), source, **options).fit()["loss"])


def test_batch_normalization_over_ranks_is_refused():
    synchronized = make_model(**SYNCHRONIZED)
    with pytest.raises(UsageError, match="jit_compile=True excludes BatchNormalization over all ranks"):
        trained(synchronized, jit_compile=True)


def test_deterministic_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "is_deterministic", lambda: True)
    with pytest.raises(UsageError, match="jit_compile=True excludes deterministic=True"):
        trained(make_model(), jit_compile=True)
