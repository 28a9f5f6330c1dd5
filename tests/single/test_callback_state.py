"""Keras' callbacks: on which ranks they run, and what they remember when a run is resumed."""

import keras
import numpy as np
import pytest

from hvdtrain.optim import rank_policy
from hvdtrain.training.callback_state import CallbackState

REFUSED = {"BackupAndRestore"}
BASES = {"Callback", "CallbackList"}


def shipped() -> dict[str, type]:
    """All classes of keras.callbacks."""
    return {name: each for name, each in vars(keras.callbacks).items() if isinstance(each, type)}


def test_each_callback_that_keras_ships_has_a_place():
    """A new one is missing here: decide whether it writes, and add it to the writers or the deciders."""
    places = {*rank_policy.PLACES, *rank_policy.DECIDERS, *REFUSED, *BASES}
    assert set(shipped()) <= places


def test_the_place_that_a_writer_writes_to_is_known(tmp_path):
    made = {
        "CSVLogger": keras.callbacks.CSVLogger(tmp_path / "a.csv"),
        "ModelCheckpoint": keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"),
        "RemoteMonitor": keras.callbacks.RemoteMonitor("http://localhost:1"),
        "TensorBoard": keras.callbacks.TensorBoard(tmp_path / "a"),
        "BackupAndRestore": keras.callbacks.BackupAndRestore(tmp_path / "a"),
    }
    for name, callback in made.items():
        found = rank_policy.place_of(callback)
        assert found is not None, name
        assert found[0] == name
        assert found[1].startswith((str(tmp_path), "http://localhost:1"))


def compiled() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse", metrics=["mae"])
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return model


LOSSES = [1.0, 0.9, 0.89, 0.2, 0.19, 0.19, 0.18, 0.18, 0.18, 0.17]
DECIDERS = {
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05, factor=0.5, cooldown=1),
    "plateau of a maximum": lambda: keras.callbacks.ReduceLROnPlateau("mae", patience=1, min_delta=0.05, mode="max"),
    "early stopping": lambda: keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.05),
    "best weights": lambda: keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
    "early stopping of a maximum": lambda: keras.callbacks.EarlyStopping("mae", patience=2, min_delta=0.05, mode="max"),
    "schedule": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
    "not a number": keras.callbacks.TerminateOnNaN,
    "history": keras.callbacks.History,
    "own": lambda: Own(),
}


class Own(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.best = {"loss": np.inf, "weights": None}

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, logs["loss"]))
        if logs["loss"] < self.best["loss"]:
            self.best = {"loss": logs["loss"], "weights": self.model.get_weights()}


def decisions(callback, model, epochs):
    found = []
    for epoch in epochs:
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, {"loss": LOSSES[epoch], "mae": LOSSES[epoch]})
        found.append((float(model.optimizer.learning_rate), bool(model.stop_training)))
    return found


def begun(make, model) -> tuple:
    callback = make()
    callback.set_params({"epochs": len(LOSSES)})
    callback.set_model(model)
    model.stop_training = False
    callback.on_train_begin()
    state = CallbackState([callback])
    state.begin()
    return callback, state


@pytest.mark.parametrize("name", DECIDERS)
@pytest.mark.parametrize("resumed_at", [1, 2, 5])
def test_a_resumed_callback_decides_as_one_that_was_not_interrupted(name, resumed_at):
    model = compiled()
    callback, _ = begun(DECIDERS[name], model)
    expected = decisions(callback, model, range(len(LOSSES)))

    model = compiled()
    callback, state = begun(DECIDERS[name], model)
    before = decisions(callback, model, range(resumed_at))
    saved, stopped = state.state(), model.stop_training
    callback, state = begun(DECIDERS[name], model)
    state.restore(saved)
    model.stop_training = stopped
    assert before + decisions(callback, model, range(resumed_at, len(LOSSES))) == expected
    assert state.newly_unrestorable() == []


def test_what_cannot_be_restored_is_named_once():
    class Keeps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.plain, self.lock = 1, object()

    model = compiled()
    callback, state = begun(Keeps, model)
    assert state.newly_unrestorable() == []
    callback.on_epoch_end(0)
    assert state.newly_unrestorable() == ["Keeps.lock"]
    assert state.newly_unrestorable() == []
    assert state.state()[0]["attributes"] == {"plain": 1}
