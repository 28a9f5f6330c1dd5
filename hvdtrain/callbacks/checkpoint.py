"""Checkpoints of ``model.fit``, from which the same command resumes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from hvdtrain.checkpoint import random_state
from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.checkpoint.plain_values import is_plain
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import build_optimizer
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.shutdown import end_job
from hvdtrain.system.terminal import report
from hvdtrain.training.callback_state import RESTORABLE, CallbackState


class Checkpoint(keras.callbacks.Callback):
    """Saves everything that ``model.fit`` needs to continue: the same command, started again, resumes.

    ``callbacks=hvdtrain.callbacks.distributed([hvdtrain.callbacks.Checkpoint("run"), …])``

    A checkpoint holds the weights, the optimizer, the loss scale, the metrics, the history, the state of the other
    callbacks, the state of all random generators, and the epoch and the step within it. It is complete or absent, and
    is verified before the run resumes from it. An interrupted run ends with the same bits as an uninterrupted one, if
    its data have the same order when the program starts again (call ``hvdtrain.init(seed=…)``). One rank is enough. On
    another number of ranks, a run resumes without the random state of its ranks.

    SIGTERM (and Ctrl-C) lets all ranks save after the same step; the job then ends with exit code 75. A rank that is
    lost while ``model.fit`` trains ends the job with a line that names it.

    Args:
        directory: new, empty, or the folder of this run's checkpoints; or its URL in an object store.
        every: save after so many steps; ``"epoch"``: after each epoch. The end of training is always saved.
        keep: the number of checkpoints to keep.
        reads_data_again: read the data of all steps made so far before training resumes, so that shuffled data
            continue in the same order. False: only those of the current epoch, which begins with the order of the first
            one.
        collectives: the ranks that train together (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: ``every`` or ``keep`` is below 1.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int | Literal["epoch"] = "epoch",
        keep: int = 3,
        reads_data_again: bool = True,
        collectives: Collectives | None = None,
    ):
        super().__init__()
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise UsageError(f'every must be "epoch" or a number of steps, at least 1. Received: {every!r}')
        if keep < 1:
            raise UsageError(f"keep must be at least 1. Received: {keep}")
        self._directory = directory
        self._every = every
        self._keep = keep
        self.reads_data_again = reads_data_again
        self._collectives = collectives or runtime.current().collectives
        self._watch: JobWatch | None = None
        self._epoch = self._step = self._num_steps = self._saved_at = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        raise UsageError(
            "Checkpoint must be called by hvdtrain.callbacks.distributed, after the other callbacks. Received: one in "
            "another list. Pass callbacks=hvdtrain.callbacks.distributed([…]) to model.fit; Trainer has a Checkpointer."
        )

    def begin(self, others: Sequence[keras.callbacks.Callback]) -> "Position | None":
        """Restores the latest checkpoint. After ``on_train_begin`` of the other callbacks; all ranks must call it.

        Returns:
            Where to continue; None at the first step.
        """
        build_optimizer(self.model)
        self._others = CallbackState(others)
        self._others.begin()
        self._checkpointer = Checkpointer(
            self._directory,
            self.model,
            keep=self._keep,
            collectives=self._collectives,
            identity={"steps are made by": "model.fit"},
        )
        self._watch = JobWatch(self._collectives, stall_timeout_s=0)
        self._watch.start()
        self._epoch = self._step = self._num_steps = self._saved_at = 0
        at_begin = random_state.capture()
        restored = self._checkpointer.restore()
        if restored is None:
            return None
        state = restored.state
        self._epoch, self._step, self._num_steps = state["epoch"], state["step"], state["steps"]
        self._saved_at = self._num_steps
        if self._step and state["steps_per_epoch"] != self.params.get("steps"):
            raise UsageError(
                "an epoch that is resumed must have the same number of steps as before. Received: "
                f"{self.params.get('steps')} steps, and {state['steps_per_epoch']} before. Choose the number of ranks "
                "and the batch size so that they are the same, or resume from a checkpoint at the end of an epoch."
            )
        self._others.restore(state["callbacks"])
        if self._collectives.rank == 0:
            report(0, f"resumed after step {self._num_steps}, in epoch {self._epoch + 1}, from {restored.path}")
        has_ended = state["stopped"] or self._epoch >= self.params["epochs"]
        position = Position(self._epoch, self._step, has_ended, self._continuing(restored))
        # Data that a generator shuffles are read again from the beginning.
        random_state.restore(at_begin)
        return position

    def epoch_begins(self, epoch: int) -> None:
        """At the begin of an epoch that has not begun before."""
        self._epoch, self._step = epoch, 0

    def batch_ends(self, batch: int) -> None:
        """After the other callbacks, at the end of a step; all ranks must call it."""
        self._num_steps += batch + 1 - self._step
        self._step = batch + 1
        self._stop_if_requested()
        if self._every != "epoch" and self._num_steps // self._every > self._saved_at // self._every:
            self._save()

    def epoch_ends(self, logs: Mapping[str, Any]) -> None:
        """After the other callbacks, at the end of an epoch; all ranks must call it."""
        self._epoch, self._step = self._epoch + 1, 0
        is_last = self.model.stop_training or self._epoch >= self.params["epochs"]
        if self._every == "epoch" or is_last:
            # Keras adds the values of the epoch to the history after this.
            self._save(logs, wait=is_last)
        self._stop_if_requested(logs)

    def close(self) -> None:
        """After training, also after an error."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _stop_if_requested(self, logs: Mapping[str, Any] | None = None) -> None:
        assert self._watch is not None
        self._watch.heartbeat("training", self._num_steps)  # So that a message about a lost rank names its step.
        if not self._watch.check():
            return
        self._save(logs, wait=True)
        stopped = StoppedEarly(
            f"stopped after step {self._num_steps} ({self._watch.stop_reason}). The state is saved; start the same "
            "command again to resume."
        )
        end_job(stopped, self._collectives, self._num_steps, self._watch)

    def _save(self, logs: Mapping[str, Any] | None = None, *, wait: bool = False) -> None:
        self._saved_at = self._num_steps
        state = {
            "epoch": self._epoch,
            "step": self._step,
            "steps": self._num_steps,
            "steps_per_epoch": self.params.get("steps"),
            "stopped": bool(self.model.stop_training),
            "callbacks": self._others.state(),
            "history": self._history(logs),
        }
        # Here too, because metrics have no variables yet when the run is restored.
        rank_state = {"metrics": [variable.numpy() for variable in self.model.metrics_variables]}
        self._checkpointer.save(self._num_steps, state=state, rank_state=rank_state, wait=wait)
        if (lost := self._others.newly_unrestorable()) and self._collectives.rank == 0:
            report(0, f"a resumed run will not restore {', '.join(lost)}: {RESTORABLE}")

    def _history(self, logs: Mapping[str, Any] | None) -> dict[str, Any]:
        history = self.model.history
        values = {name: list(each) for name, each in history.history.items()}
        epochs = list(history.epoch)
        if logs is not None:
            epochs.append(self._epoch - 1)
            for name, value in logs.items():
                values.setdefault(name, []).append(value)
        plain = {name: [_plain(value) for value in each] for name, each in values.items()}
        return {"epochs": epochs, "values": plain}

    def _continuing(self, restored: Restored) -> Callable[[], None]:
        random, history = random_state.capture(), restored.state["history"]
        metrics = restored.rank_state["metrics"] if self._step and restored.rank_state else []

        def continue_here() -> None:
            # Reading the data may have drawn random numbers, and Keras resets metrics and history when it begins.
            random_state.restore(random)
            for variable, value in zip(self.model.metrics_variables, metrics, strict=False):
                variable.assign(value)
            self.model.history.epoch[:] = history["epochs"]
            self.model.history.history.update(history["values"])

        return continue_here


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run continues."""

    epoch: int
    step: int
    """The number of steps made in the epoch."""
    has_ended: bool
    """Whether nothing remains to be done."""
    continue_here: Callable[[], None]
    """Call it before the next step."""


def _plain(value: Any) -> Any:
    return value if is_plain(value) else np.asarray(value)
