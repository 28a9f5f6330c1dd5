"""On all ranks: model.fit and loops of ranks that differ in arguments, models, data or decisions."""

import itertools

import keras
import pytest
import tensorflow as tf
from fit_programs import (
    BATCH,
    RANK,
    SHARD_X,
    SHARD_Y,
    SIZE,
    TEST_SHARD,
    WITH_AND_WITHOUT,
    X,
    Y,
    compiled,
    fit,
    of_unknown_length,
)
from keras import layers
from models import NUM_CLASSES, dense_model, loss, relative_difference, values

import hvdtrain
from hvdtrain.callbacks import BroadcastGlobalVariablesCallback, distributed
from hvdtrain.errors import DisagreementError, DivergenceError, UsageError


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


OTHER_VARIABLES = {
    "a stream of random numbers": (
        lambda: keras.Sequential([layers.Input((6,)), layers.Dense(2), layers.Dropout(0.5 * IS_ODD)]),
        r"the same model\. Received: model variable 2: missing on ranks? 0.*, '.*seed_generator_state \(2,\) int64' on",
    ),
    "as many numbers": (
        lambda: [tf.Variable(tf.zeros([2, 3] if IS_ODD else [3, 2]), name="table")],
        r"the same variables\. Received: variable 0: 'table:0 \(3, 2\) float32' on ranks? 0.*, 'table:0 \(2, 3\)",
    ),
    "one more": (
        lambda: [tf.Variable(0.0) for _ in range(1 + IS_ODD)],
        r"the same variables\. Received: variable 1: missing on ranks? 0.*, 'Variable:0 \(\) float32' on",
    ),
    "another dtype": (
        lambda: [keras.Variable([0.0, 0.0], dtype="float32" if IS_ODD else "int32", name="counts")],
        r"the same variables\. Received: variable 0: 'counts \(2,\) int32' on ranks? 0.*, 'counts \(2,\) float32'",
    ),
}


@pytest.mark.parametrize("kind", OTHER_VARIABLES)
def test_other_variables_are_refused_before_they_are_broadcast(kind):
    make, found = OTHER_VARIABLES[kind]
    with pytest.raises(DisagreementError, match=f"all ranks must have {found}"):
        hvdtrain.broadcast(make())


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
