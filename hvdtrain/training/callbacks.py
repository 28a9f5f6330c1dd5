"""Keras callbacks on many ranks: writers run on rank 0, all others on every rank with the same values."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.optim.ema import require_whole_ema
from hvdtrain.optim.rank_policy import (
    TEST_BATCH_HOOKS,
    only_writes,
    overrides,
    require_savable,
    require_usable,
    saves_weights,
    uses_train_batches,
)
from hvdtrain.training.callback_state import CallbackState


class EvaluationCallbacks(Protocol):
    """What an evaluation calls."""

    use_test_batches: bool
    """Whether it calls callbacks at each batch."""

    def test_begins(self) -> None: ...
    def test_batch_begins(self, batch: int) -> None: ...
    def test_batch_ends(self, batch: int) -> None: ...
    def test_ends(self, values: Mapping[str, Any]) -> None: ...


class NoCallbacks:
    """An evaluation without callbacks."""

    use_test_batches = False

    def test_begins(self) -> None: ...
    def test_batch_begins(self, batch: int) -> None: ...
    def test_batch_ends(self, batch: int) -> None: ...
    def test_ends(self, values: Mapping[str, Any]) -> None: ...


class RankCallbacks:
    """Calls the callbacks that run on this rank.

    Writers (:class:`keras.callbacks.ModelCheckpoint`, ``CSVLogger``, ``TensorBoard``, …, and any of
    the user's with an attribute ``only_on_rank_zero = True``) run on rank 0. All others run on every
    rank; they receive the values of all ranks, and if one of them stops the training on any rank, it
    stops on all.

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
        total_steps: int,
        steps_per_epoch: int,
    ):
        require_usable(callbacks, "the trainer resumes from a checkpointer")
        require_whole_ema(model, callbacks)
        require_savable(model, callbacks)
        self._callbacks = list(callbacks)
        self._state = CallbackState(self._callbacks)
        self._model = model
        self._collectives = collectives
        mine = [each for each in callbacks if collectives.rank == 0 or not only_writes(each)]
        self._list = keras.callbacks.CallbackList(
            mine,
            add_history=True,
            model=model,
            epochs=-(-total_steps // steps_per_epoch),
            steps=steps_per_epoch,
            verbose=0,
        )
        self._has_begun = False
        self._resumed_state: Sequence[Mapping[str, Any]] | None = None
        # Considers all callbacks, not only those that run on this rank: all ranks must reduce.
        self.use_train_batches = any(uses_train_batches(each) for each in callbacks)
        self.use_test_batches = any(overrides(each, TEST_BATCH_HOOKS) for each in callbacks)
        self.swap_averaged_weights = any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks)

    def rank_changed(self) -> None:
        """Call it when this process's rank has changed: on rank 0, writers begin to run, and continue their files.

        Those that run already continue: each is called at the end of what it has begun.
        """
        for callback in self._callbacks if self._collectives.rank == 0 else ():
            if callback not in self._list.callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True
                callback.set_params(self._list.params)
                callback.set_model(self._model)
                self._list.append(callback)
                callback.on_train_begin()

    def members_changed(self, rank: int, size: int) -> None:
        """Calls ``on_membership_changed(rank, size)`` of those that have such a method."""
        for callback in self._list.callbacks:
            if hasattr(callback, "on_membership_changed"):
                callback.on_membership_changed(rank, size)

    @property
    def names(self) -> list[str]:
        """The class names, for comparison over ranks."""
        return [type(each).__name__ for each in self._callbacks]

    @property
    def save_intervals(self) -> list[int]:
        """The intervals in steps at which a callback saves the model within an epoch."""
        checkpoints = [each for each in self._callbacks if saves_weights(each)]
        return [each.save_freq for each in checkpoints if each.save_freq != "epoch"]

    def train_begins(self) -> None:
        """Before the first step."""
        self._model.stop_training = False
        if self._resumed_state is not None:
            for callback in self._callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True
        self._list.on_train_begin()
        self._state.begin()
        self._has_begun = True
        self.restore(self._resumed_state or [])

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state` returned, at the latest when training begins, which resets callbacks."""
        if self._has_begun:
            self._state.restore(state)
        else:
            self._resumed_state = state

    def state(self) -> list[dict[str, Any]]:
        """The state of each callback; see :class:`~hvdtrain.training.callback_state.CallbackState`."""
        return self._state.state()

    def newly_unrestorable(self) -> list[str]:
        """Attributes of callbacks that a resumed run will lack, each returned once."""
        return self._state.newly_unrestorable()

    def epoch_begins(self, epoch: int) -> None:
        self._list.on_epoch_begin(epoch)

    def train_call_begins(self, batch: int) -> None:
        """Before a call of one or more steps; ``batch`` is the number of the first one in the epoch."""
        self._list.on_train_batch_begin(batch)

    def train_call_ends(self, batch: int, values: Mapping[str, Any]) -> bool:
        """After a call; ``batch`` is the number of its last step. Returns whether training must stop."""
        self._list.on_train_batch_end(batch, dict(values))
        return self._stops_on_any_rank()

    def epoch_ends(self, epoch: int, values: Mapping[str, Any]) -> bool:
        """Returns whether training must stop."""
        self._list.on_epoch_end(epoch, dict(values))
        return self._stops_on_any_rank()

    def train_ends(self, values: Mapping[str, Any]) -> None:
        self._list.on_train_end(dict(values))

    def test_begins(self) -> None:
        self._list.on_test_begin()

    def test_batch_begins(self, batch: int) -> None:
        self._list.on_test_batch_begin(batch)

    def test_batch_ends(self, batch: int) -> None:
        """Without values: ranks have different numbers of batches, and cannot reduce after each."""
        self._list.on_test_batch_end(batch)

    def test_ends(self, values: Mapping[str, Any]) -> None:
        self._list.on_test_end(dict(values))

    def _stops_on_any_rank(self) -> bool:
        # A callback may decide by its rank's clock: that rank would stop, and the others would wait for it forever.
        (stopping,) = self._collectives.sum([np.array(float(self._model.stop_training), np.float32)])
        self._model.stop_training = bool(stopping)
        return bool(stopping)
