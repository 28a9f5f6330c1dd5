"""Reads the data of the steps that a run has made, so that a resumed ``model.fit`` continues with the next batch."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.seams import keras_internals
from hvdtrain.training.eval_step import build_metrics

_PROGRESS_HOOKS = ("on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end")


class Replay:
    """Lets Keras' loop pass the epochs and steps that were made before, with their data but without training.

    The order of shuffled data depends on how often it was read, so that nothing but reading it again gives the same
    order.

    Args:
        model: trained by ``model.fit``.
        epoch: the epoch to continue in.
        step: the steps that were made in it.
        finish: called before the first step that is made.
    """

    def __init__(self, model: keras.Model, epoch: int, step: int, finish: Callable[[], None]):
        self._model = model
        self._epoch = epoch
        self._step = step
        self._finish = finish
        self._mutes = ExitStack()
        self._is_active = True
        self._has_metrics = False

    @property
    def num_passed_steps(self) -> int:
        """The number of steps that were made before in the epoch to continue in."""
        return self._step

    def covers_epoch(self, epoch: int) -> bool:
        """Whether an epoch was completed before."""
        return epoch < self._epoch

    def covers_begin(self, epoch: int) -> bool:
        """Whether an epoch had begun before."""
        return self.covers(epoch, 0)

    def covers(self, epoch: int, batch: int) -> bool:
        """Whether a step was made before."""
        return epoch < self._epoch or (epoch == self._epoch and batch < self._step)

    def begin(self) -> None:
        """Before the first epoch of the loop."""
        for hook in _PROGRESS_HOOKS:
            self._mutes.callback(replace_method(keras.callbacks.ProgbarLogger, hook, _nothing))
        self._mutes.callback(replace_method(keras.callbacks.History, "on_epoch_end", _nothing))
        # No validation of epochs that were made.
        self._mutes.callback(replace_method(self._model, keras_internals.SHOULD_EVALUATE.name, _never))

    def epoch_begins(self, epoch: int) -> None:
        """At the begin of each epoch of the loop, when Keras has compiled its step."""
        if not self._is_active:
            return
        if epoch == self._epoch:
            self._mutes.close()
        if self.covers_begin(epoch):
            self._pass_steps(epoch)
        else:
            self._end()

    def close(self) -> None:
        """Ends it, also after an error."""
        self._mutes.close()
        self._is_active = False
        self._model.train_function = getattr(self._model.train_function, "replaces", self._model.train_function)

    def _end(self) -> None:
        self.close()
        self._finish()

    def _pass_steps(self, epoch: int) -> None:
        passed_steps = 0
        train = self._model.train_function
        train = getattr(train, "replaces", train)

        def pass_step(iterator: Any) -> Any:
            nonlocal passed_steps
            self._build_metrics(_read(iterator, self._model.steps_per_execution))
            passed_steps += self._model.steps_per_execution
            if epoch < self._epoch or passed_steps < self._step:
                return {}
            self._end()
            # Of the whole epoch so far, if no other step follows.
            return self._model.get_metrics_result()

        vars(pass_step)["replaces"] = train
        self._model.train_function = pass_step

    def _build_metrics(self, batch: Any) -> None:
        """Creates the variables of metrics, as the first step does: Keras asks for their values after each epoch."""
        if not self._has_metrics:
            spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
            with suppress(Exception):  # A user's own train_step need not call the model as Keras would.
                build_metrics(self._model, (spec, tf.TensorSpec([])))
        self._has_metrics = True


def _read(iterator: Any, num_batches: int) -> Any:
    """Reads as many batches as a step of Keras does, and returns the first; raises as it does if there is none."""
    first = next(iterator)
    with suppress(StopIteration, tf.errors.OutOfRangeError):
        for _ in range(num_batches - 1):
            next(iterator)
    return first


def _nothing(*arguments: Any, **named: Any) -> None:
    pass


def _never(*arguments: Any, **named: Any) -> bool:
    return False
