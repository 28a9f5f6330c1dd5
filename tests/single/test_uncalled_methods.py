"""Models with a ``fit``, ``evaluate`` or ``predict`` of their own: hvdtrain tells of those that it does not call."""

import keras
import numpy as np
import pytest
from keras import layers

import hvdtrain
from hvdtrain.data import Arrays, Data
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.training import uncalled_methods

hvdtrain.init()
X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
DATA = Data(Arrays(X, Y), Arrays(X, Y))


class OwnMethods(keras.Model):
    def fit(self, *arguments, **options):
        return super().fit(*arguments, **options)

    def evaluate(self, *arguments, **options):
        return super().evaluate(*arguments, **options)

    def predict(self, *arguments, **options):
        return super().predict(*arguments, **options)


class Derived(OwnMethods):
    pass


class Warnings(Reporter):
    def __init__(self):
        self.texts = []

    def warned(self, step, text):
        self.texts.append(text)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(uncalled_methods, "_told", set())


def compiled(make_model=OwnMethods) -> keras.Model:
    inputs = keras.Input((3,))
    model = make_model(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


def warnings_of_training(model: keras.Model, data: Data = DATA) -> list[str]:
    reporter = Warnings()
    hvdtrain.Trainer(model, data, hvdtrain.TrainConfig(batch_size=4, epochs=1), reporter=reporter).fit()
    return reporter.texts


def test_the_trainer():
    fit = "Trainer calls train_step itself, and not OwnMethods.fit: what else that method does is left out"
    evaluate = "Trainer calls test_step itself, and not OwnMethods.evaluate: what else that method does is left out"
    assert warnings_of_training(compiled(), Data(DATA.training)) == [fit]
    # Once for each method.
    assert warnings_of_training(compiled(Derived)) == [evaluate]
    assert warnings_of_training(compiled(Derived)) == []


@pytest.mark.parametrize("make_model", [keras.Model, OwnMethods])
def test_functions(make_model, capfd):
    model = compiled(make_model)
    for _ in range(2):
        hvdtrain.evaluate(model, (X, Y))
        hvdtrain.predict(model, X)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hvdtrain: ")]
    if make_model is keras.Model:
        assert told == []
        return
    rest = "what else that method does is left out."
    assert told == [
        f"hvdtrain: hvdtrain.evaluate calls test_step itself, and not OwnMethods.evaluate: {rest}",
        f"hvdtrain: hvdtrain.predict calls predict_step itself, and not OwnMethods.predict: {rest}",
    ]


def test_models_of_keras_and_those_that_preprocess_their_samples():
    assert warnings_of_training(compiled(keras.Model)) == []

    class Preprocessing(OwnMethods):
        def preprocess_samples(self, x, y=None, sample_weight=None):
            return x, y

    assert warnings_of_training(compiled(Preprocessing)) == []
