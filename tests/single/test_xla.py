"""Steps whose forward and backward pass XLA compiles: the same updates, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.system import devices

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


def make_model(optimizer=None, *, model_class=keras.Model, more=()) -> keras.Model:
    keras.utils.set_random_seed(3)
    tokens = layers.Input((8,), dtype="int32")
    x = layers.LSTM(6)(layers.Embedding(50, 4)(tokens))
    for layer in [layers.BatchNormalization(), *more]:
        x = layer(x)
    model = model_class(tokens, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def trained(model, labels=LABELS, **options):
    """An epoch of 70 samples: the last batch is short."""
    summary = make_trainer(model, Arrays(TOKENS, labels), batch_size=16, epochs=2, **options).fit()
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"more": [AsksPython()]}, "XLA cannot compile this model: .*PyFunc.*Set --no-jit-compile"),
        ({"model_class": AppliesTwice}, "must apply gradients once. Received: AppliesTwice.train_step, which does 2"),
        ({"model_class": TwoOptimizers}, "one optimizer must train the whole model. Received: TwoOptimizers, with 2"),
    ],
)
def test_what_xla_cannot_compile(options, message):
    with pytest.raises(UsageError, match=message):
        trained(make_model(**options), jit_compile=True)
    trained(make_model(**options), jit_compile=False)


SYNCHRONIZED = {"more": [layers.BatchNormalization(synchronized=True)]}


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
    model = make_model(**model_options)
    model.jit_compile = by_keras
    trainer = make_trainer(model, Arrays(TOKENS, LABELS), batch_size=16, epochs=1, **options)
    assert trainer._runner.config.jit_compile == is_compiled
    if is_compiled:
        assert np.isfinite(trainer.fit()["loss"])


def test_batch_normalization_over_ranks_is_refused():
    synchronized = make_model(more=[layers.BatchNormalization(synchronized=True)])
    with pytest.raises(UsageError, match=r"Received: 1 synchronized layer\(s\)"):
        trained(synchronized, jit_compile=True)


def test_deterministic_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "is_deterministic", lambda: True)
    with pytest.raises(UsageError, match="jit_compile excludes deterministic"):
        trained(make_model(), jit_compile=True)
