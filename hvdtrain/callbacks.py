"""Keras' callbacks on many ranks: those that write run on rank 0, those that decide run everywhere and see the same."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.tree import is_plain
from hvdtrain.collectives import Collectives
from hvdtrain.errors import UsageError

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# What these hold is their place in a file, not what a run has come to.
_WITHOUT_STATE = (keras.callbacks.CSVLogger, keras.callbacks.ProgbarLogger, keras.callbacks.TensorBoard)
_TRAIN_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


class RankCallbacks:
    """Calls this rank's share of the callbacks.

    Writers (:class:`keras.callbacks.ModelCheckpoint`, ``CSVLogger``, ``TensorBoard``, …, and any of
    the user's with an attribute ``only_on_rank_zero = True``) run on rank 0. All others run on every
    rank; the values they are given are those of all ranks, and where one of them stops the training
    on any rank, it stops on all.

    Args:
        callbacks: the same on every rank.

    Raises:
        UsageError: a callback cannot work on several ranks.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        collectives: Collectives,
        *,
        epochs: int,
        steps_per_epoch: int,
    ):
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise UsageError(f"callbacks must be Keras callbacks. Received: {callback!r}")
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UsageError(
                    "BackupAndRestore would restore rank 0 alone. Leave it out: resuming is the trainer's own work."
                )
        self._callbacks = list(callbacks)
        self._model = model
        self._collectives = collectives
        mine = [each for each in callbacks if collectives.rank == 0 or not _only_writes(each)]
        self._list = keras.callbacks.CallbackList(
            mine, add_history=True, model=model, epochs=epochs, steps=steps_per_epoch, verbose=0
        )
        # Asked of all callbacks, not of this rank's: what follows from it is done by every rank.
        self.hear_train_batches = any(_hears_train_batches(each) for each in callbacks)
        self.hear_test_batches = any(_overrides(each, _TEST_BATCH_HOOKS) for each in callbacks)
        self.terminate_on_nan = any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in callbacks)
        self.swap_averaged_weights = any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks)

    @property
    def names(self) -> list[str]:
        """The classes, for comparison over ranks."""
        return [type(each).__name__ for each in self._callbacks]

    @property
    def save_intervals(self) -> list[int]:
        """The numbers of steps after which a ModelCheckpoint saves in the middle of an epoch."""
        checkpoints = [each for each in self._callbacks if isinstance(each, keras.callbacks.ModelCheckpoint)]
        return [each.save_freq for each in checkpoints if each.save_freq != "epoch"]

    def train_begins(self, state: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Before the first step; ``state`` is that of the run that is gone on from, see :meth:`state`."""
        self._model.stop_training = False
        if state is not None:
            for callback in self._callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True
        self._list.on_train_begin()
        self._at_beginning = [_plain_attributes(callback) for callback in self._callbacks]
        for callback, saved in zip(self._callbacks, state or [], strict=False):
            if saved["class"] == type(callback).__name__:
                vars(callback).update(saved["attributes"])

    def state(self) -> list[dict[str, Any]]:
        """What callbacks have come to: of each, its plain attributes that have changed since training began.

        What a user gave them, as ``patience``, has not changed and is not taken over by a resumed run.
        """
        return [
            {"class": type(callback).__name__, "attributes": _changed(_plain_attributes(callback), before)}
            for callback, before in zip(self._callbacks, self._at_beginning, strict=True)
        ]

    def epoch_begins(self, epoch: int) -> None:
        self._list.on_epoch_begin(epoch)

    def train_call_begins(self, batch: int) -> None:
        """Before a call of one or more steps; ``batch`` is the first one's number in the epoch."""
        self._list.on_train_batch_begin(batch)

    def train_call_ends(self, batch: int, values: Mapping[str, float]) -> bool:
        """After it; ``batch`` is the last one's number. Gives back whether training is to stop."""
        self._list.on_train_batch_end(batch, dict(values))
        return self._stops_on_any_rank()

    def epoch_ends(self, epoch: int, values: Mapping[str, float]) -> bool:
        """Gives back whether training is to stop."""
        self._list.on_epoch_end(epoch, dict(values))
        return self._stops_on_any_rank()

    def train_ends(self, values: Mapping[str, float]) -> None:
        self._list.on_train_end(dict(values))

    def test_begins(self) -> None:
        self._list.on_test_begin()

    def test_batch_begins(self, batch: int) -> None:
        self._list.on_test_batch_begin(batch)

    def test_batch_ends(self, batch: int) -> None:
        """Without values: ranks have different numbers of batches, and cannot meet after each."""
        self._list.on_test_batch_end(batch)

    def test_ends(self, values: Mapping[str, float]) -> None:
        self._list.on_test_end(dict(values))

    def _stops_on_any_rank(self) -> bool:
        # A callback may look at its own clock: one rank would leave, and the others wait for it for ever.
        (stopping,) = self._collectives.sum([np.array(float(self._model.stop_training), np.float32)])
        self._model.stop_training = bool(stopping)
        return bool(stopping)


def _plain_attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if isinstance(callback, _WITHOUT_STATE):
        return {}
    # Copied: a list that grows later would look unchanged.
    return {name: copy.deepcopy(value) for name, value in vars(callback).items() if is_plain(value)}


def _changed(attributes: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in before or not _same(value, before[name])}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is other
    try:
        return bool(one == other)
    except ValueError:  # lists of arrays
        return False


def _only_writes(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, _WRITERS) or getattr(callback, "only_on_rank_zero", False)


def _hears_train_batches(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_freq != "epoch"
    return _overrides(callback, _TRAIN_BATCH_HOOKS)


def _overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    # On the object: LambdaCallback sets its functions there.
    methods = [(getattr(callback, hook), getattr(keras.callbacks.Callback, hook)) for hook in hooks]
    return any(getattr(method, "__func__", method) is not default for method, default in methods)
