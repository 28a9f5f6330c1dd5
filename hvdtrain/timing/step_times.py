"""Where the time of a step goes, measured inside the compiled step: waiting for input, computing, reducing."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import process
from hvdtrain.collectives import Collectives

_CAPACITY = 1024
"""Steps that are kept between two calls of drain(); of more, the latest."""


def _now() -> tf.Tensor:
    """The seconds since 1970, read in the compiled step."""
    if process.is_deterministic():  # tf.timestamp is refused then
        now = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)
        now.set_shape([])
        return now
    return tf.timestamp()


class StepTimes:
    """Notes for each step how long this rank waited for input, worked, and waited for the reduction.

    *Reducing* is from the moment this rank's gradients are all there until all are reduced: what of
    the allreduce was not hidden behind the backward pass, waiting for slower ranks included.

    Args:
        micro_batches_per_step: as the optimizer accumulates.
    """

    def __init__(self, micro_batches_per_step: int):
        self.micro_batches_per_step = micro_batches_per_step
        with tf.device("CPU"):
            self._rows = tf.Variable(tf.zeros([_CAPACITY, 3], tf.float64), trainable=False)
            self._micro_batches = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._began, self._waited, self._ready, self._reducing = (
                tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(4)
            )
        # While a micro-batch is traced: when its step began, and how long that waited for input.
        self._input: tuple[Any, Any] = self._began, self._waited
        self._drained = 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches that were trained on, a step that failed not included."""
        return int(self._micro_batches.numpy())

    def restore(self, steps: int) -> None:
        """Goes on counting from there."""
        self._micro_batches.assign(steps * self.micro_batches_per_step)
        self._drained = steps

    def _steps_made(self) -> tf.Tensor:
        if self.micro_batches_per_step == 1:
            return self._micro_batches.read_value()
        return self._micro_batches // self.micro_batches_per_step

    def step_under_way(self) -> tf.Tensor:
        """The number of the step that is being made, from 1; to be read in the compiled step."""
        return self._steps_made() + 1

    def begins_step(self) -> tf.Tensor:
        """True in the first micro-batch of a step; to be read in the compiled step."""
        if self.micro_batches_per_step == 1:
            return tf.constant(True)
        return self._micro_batches % self.micro_batches_per_step == 0

    def next_batch(self, iterator: Any) -> Any:
        """The iterator's next element; to be called at the start of each micro-batch, in the compiled step."""
        with tf.device("CPU"):
            is_first = self.begins_step()
            with tf.control_dependencies([is_first]):
                began = _now()
            with tf.control_dependencies([began]):
                batch = iterator.get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                waited = _now() - began
            # Nothing that computes may come before the time is taken: it could be queued behind.
            with tf.control_dependencies([waited]):
                batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
            self._input = began, waited
            if self.micro_batches_per_step > 1:
                self._began.assign(tf.where(is_first, began, self._began))
                self._waited.assign(tf.where(is_first, waited, self._waited + waited))
                self._input = self._began, self._waited
        return batch

    def note_reduction(self, sent: Sequence[tf.Tensor], after: tf.Tensor) -> None:
        """To be called where gradients are reduced, in the compiled step.

        Args:
            sent: this rank's gradients, as they are handed over.
            after: a value computed from all reduced gradients. A mere control dependency on them is
                not enough: Horovod reduces in a function, whose end it would not wait for.
        """
        with tf.device("CPU"):
            with tf.control_dependencies(list(sent)):
                ready = _now()
            with tf.control_dependencies([ready, after]):
                done = _now()
            self._ready.assign(ready)
            self._reducing.assign(done - ready)

    def end_micro_batch(self) -> None:
        """To be called at the end of each micro-batch, in the compiled step."""
        with tf.device("CPU"):
            # Rows of micro-batches that complete no step are written over by the next.
            row = self._steps_made() % _CAPACITY
            began, waited = self._input
            times = tf.stack([waited, self._ready - began, self._reducing])
            self._rows.scatter_update(tf.IndexedSlices(times, row))
            self._micro_batches.assign_add(1)

    def drain(self) -> np.ndarray:
        """The steps since the last call, at most 1,024: seconds of waiting, until ready, reducing; ``[steps, 3]``.

        Steps without a reduction (an overflow was skipped) have NaN for the last two.
        """
        steps = self.micro_batches // self.micro_batches_per_step
        numbers = np.arange(max(self._drained, steps - _CAPACITY), steps)
        self._drained = steps
        rows = self._rows.numpy()[numbers % _CAPACITY]
        rows[rows[:, 1] < 0, 1:] = np.nan
        return rows


class TimeShares:
    """Puts the step times of all ranks together: shares of a step, and which rank the others wait for."""

    def __init__(self, times: StepTimes, collectives: Collectives, host: str):
        self._times = times
        self._collectives = collectives
        self._host = host
        self.all_steps: list[np.ndarray] = []
        """What was exchanged so far, as :meth:`StepTimes.drain` gives it, by rank: ``[ranks, steps, 3]`` each."""
        self._pending = 0

    def made(self, steps: int) -> None:
        """Tells that steps were made; exchanges what is noted before it would be lost. Every rank has to call it."""
        self._pending += steps
        if self._pending >= _CAPACITY // 2:
            self._exchange()

    def _exchange(self) -> None:
        self._pending = 0
        self.all_steps.append(np.stack(self._collectives.allgather(self._times.drain())))

    def summary(self, step_ms: float) -> dict[str, Any]:
        """Shares of a step of ``step_ms`` milliseconds on average, and the skew. Every rank has to call it."""
        self._exchange()
        hosts = self._collectives.allgather(self._host)
        times = np.concatenate(self.all_steps, axis=1)
        times = times[:, ~np.isnan(times).any(axis=(0, 2))]
        if times.shape[1] > 1:
            times = times[:, 1:]  # the first step compiles
        if not times.size:
            return {"input_fraction": 0.0, "compute_fraction": 1.0, "communication_fraction": 0.0, "skew": None}
        waited, ready, reducing = (times[:, :, i] for i in range(3))
        whole_s = max(step_ms / 1000, float(np.median(np.median(ready + reducing, axis=1))))
        input_share = float(np.median(waited)) / whole_s
        communication_share = 0.0 if len(hosts) == 1 else float(np.median(reducing)) / whole_s
        return {
            "input_fraction": input_share,
            "compute_fraction": max(0.0, 1 - input_share - communication_share),
            "communication_fraction": communication_share,
            "skew": None if len(hosts) == 1 else skew(ready, hosts),
        }


def skew(ready: np.ndarray, hosts: Sequence[str]) -> dict[str, Any]:
    """Which rank is last to be ready, and how often; ``ready`` has shape ``[ranks, steps]``."""
    last = np.bincount(np.argmax(ready, axis=0), minlength=len(hosts))
    slowest = int(np.argmax(last))
    medians = np.median(ready, axis=1)
    return {
        "slowest_rank": slowest,
        "slowest_host": hosts[slowest],
        "slowest_share": float(last[slowest] / last.sum()),
        "ratio": float(medians[slowest] / np.median(medians)),
    }
