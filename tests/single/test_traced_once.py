"""TensorFlow traces a training step and an evaluation step once, also those whose variables the first batch creates."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X[:, :1]


class Traced(keras.layers.Layer):
    """Returns its input, and counts how often it is traced."""

    times = 0

    def call(self, inputs):
        self.times += not tf.executing_eagerly()
        return inputs


def made(num_outputs, **compiled):
    """A model with an output of each name, and the layer that counts."""
    inputs, traced = keras.Input((3,)), Traced()
    hidden = traced(keras.layers.Dense(4)(inputs))
    outputs = {f"y{i}": keras.layers.Dense(1, name=f"y{i}")(hidden) for i in range(num_outputs)}
    model = keras.Model(inputs, outputs if num_outputs > 1 else outputs["y0"])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), **compiled)
    hvdtrain.broadcast(model)
    traced.times = 0
    return model, traced


@pytest.mark.parametrize(
    ("num_outputs", "compiled"),
    [
        (1, {"loss": "mse", "metrics": ["mae", keras.metrics.RootMeanSquaredError()]}),
        (1, {"loss": "mse", "weighted_metrics": ["mae"], "steps_per_execution": 2}),
        (2, {"loss": {"y0": "mse", "y1": "mae"}, "metrics": {"y0": ["mae"], "y1": []}}),
    ],
)
def test_steps_of_a_model(num_outputs, compiled):
    hvdtrain.init()
    y = {f"y{i}": Y for i in range(num_outputs)} if num_outputs > 1 else Y
    model, traced = made(num_outputs, **compiled)
    history = model.fit(X, y, batch_size=4, epochs=2, verbose=0, validation_data=(X, y)).history
    assert traced.times == 2  # The step of training, and that of validation.
    assert len(history["val_loss"]) == 2

    evaluated, traced = made(num_outputs, **compiled)
    evaluated.set_weights(model.get_weights())
    values = evaluated.evaluate(X, y, batch_size=4, verbose=0, return_dict=True)
    assert traced.times == 1
    np.testing.assert_allclose(values["loss"], history["val_loss"][-1], rtol=1e-6)
    assert set(values) == {name.removeprefix("val_") for name in history if name.startswith("val_")}


@pytest.mark.parametrize("reduces", ["optimizer", "tape"])
def test_steps_of_a_loop_of_ones_own(reduces):
    hvdtrain.init()
    model, traced = made(1)
    optimizer = keras.optimizers.Adam()
    if reduces == "optimizer":
        optimizer = hvdtrain.DistributedOptimizer(optimizer)
    else:
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        tape = tf.GradientTape()
        with tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if reduces == "tape":
            tape = hvdtrain.DistributedGradientTape(tape)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    losses = [float(step(X, Y)) for _ in range(5)]
    assert traced.times == 1
    assert losses == sorted(losses, reverse=True)
    first = model.trainable_variables[0].path.replace("/", "_")
    assert f"{optimizer.name}/{first}_momentum" in {variable.path for variable in optimizer.variables}


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has no optimizer that copies weights"
)
def test_an_optimizer_that_copies_weights_of_a_model_that_fit_builds():
    hvdtrain.init()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.ScheduleFreeAdamW()), "mse")
    model.fit(X, Y, verbose=0)
    assert model.optimizer.iterations == 1
