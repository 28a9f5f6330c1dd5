"""Losses of the whole batch on one rank: they are the loss itself, can be saved, and refuse what has no mean."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import hvdtrain
from hvdtrain.errors import UsageError

hvdtrain.init()
X, Y = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32), np.arange(32) % 3


@keras.saving.register_keras_serializable("tests")
def spread(y_true, y_pred):
    """Compares all samples; one number."""
    return ops.mean(ops.square(ops.mean(y_pred, axis=0, keepdims=True) - y_pred)) + 0.0 * ops.sum(y_true)


def trained(loss) -> keras.Model:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(3)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("loss", [spread, keras.losses.SparseCategoricalCrossentropy(from_logits=True)])
def test_on_one_rank_it_is_the_loss_itself(loss):
    ours, theirs = trained(hvdtrain.WholeBatch(loss)), trained(loss)
    assert all(np.array_equal(a, b) for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True))


@pytest.mark.parametrize("loss", ["mse", spread, keras.losses.MeanAbsoluteError()])
def test_it_can_be_saved(loss):
    made = hvdtrain.WholeBatch(loss)
    again = keras.losses.deserialize(keras.losses.serialize(made))
    assert isinstance(again, hvdtrain.WholeBatch)
    assert again.name == made.name
    y = X[:, :3]
    assert float(again(y, y * 0.5 + 1)) == float(made(y, y * 0.5 + 1))


@pytest.mark.parametrize("reduction", ["sum", None])
def test_a_loss_without_a_mean_is_refused(reduction):
    with pytest.raises(
        UsageError, match=r"the loss of a whole batch must be a mean\. Received: huber.* with reduction="
    ):
        hvdtrain.WholeBatch(keras.losses.Huber(reduction=reduction))


def test_on_one_rank_gather_and_average_return_what_they_receive():
    samples = {"x": X, "y": Y}
    assert hvdtrain.gather(samples) is samples
    assert hvdtrain.average([X, None])[0] is X
