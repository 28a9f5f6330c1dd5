"""Where the time of a step is spent, measured inside the compiled step: input, computation, communication."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system import devices
from hvdtrain.training.stragglers import REMEDIES, remedy

_CAPACITY = 1024
"""The most steps that are kept between two calls of drain(): the latest ones."""
EXCHANGE_EVERY = _CAPACITY // 2
"""Steps between two exchanges of step times over ranks."""


def _now() -> tf.Tensor:
    """Seconds since 1970, read in the compiled step."""
    if devices.is_deterministic():  # tf.timestamp is refused then
        now = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)
        now.set_shape([])
        return now
    return tf.timestamp()


def _computed(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors to wait for until others are computed, not only queued on a GPU."""
    if not devices.has_gpu():
        return list(tensors)
    with tf.device(None), tf.control_dependencies(list(tensors)):
        # Computed after them, in the same stream.
        last = tf.reshape(tensors[0], [-1])[:1]
    with tf.device("CPU"):
        return [tf.identity(last)]  # The copy waits for that stream.


class StepTimes:
    """Records for each step how long this rank waited for input, computed, and waited for the reduction.

    The reduction lasts from when all of this rank's gradients are computed until all are reduced: the exposed
    communication, which is not hidden behind the backward pass, including the wait for stragglers.

    Args:
        micro_batches_per_step: the optimizer's ``gradient_accumulation_steps``.
    """

    def __init__(self, micro_batches_per_step: int):
        self.micro_batches_per_step = micro_batches_per_step
        with tf.device("CPU"):
            self._rows = tf.Variable(tf.zeros([_CAPACITY, 3], tf.float64), trainable=False)
            self._micro_batches = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._start, self._waited, self._ready, self._reducing = (
                tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(4)
            )
        # While a micro-batch is traced: when its step started, and how long it waited for input.
        self._input: tuple[Any, Any] = self._start, self._waited
        self._drained = 0

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches trained on, not counting a step that failed."""
        return int(self._micro_batches.numpy())

    def state(self) -> int:
        """Number of complete steps that this rank has made."""
        return self.micro_batches // self.micro_batches_per_step

    def restore(self, steps: int) -> None:
        """Continues to count from this step."""
        self._micro_batches.assign(steps * self.micro_batches_per_step)
        self._drained = steps

    def _completed_steps(self) -> tf.Tensor:
        if self.micro_batches_per_step == 1:
            return self._micro_batches.read_value()
        return self._micro_batches // self.micro_batches_per_step

    def current_step(self) -> tf.Tensor:
        """The number of the current step, from 1; call it in the compiled step."""
        return self._completed_steps() + 1

    def begins_step(self) -> tf.Tensor:
        """Whether this is the first micro-batch of a step; call it in the compiled step."""
        if self.micro_batches_per_step == 1:
            return tf.constant(True)
        return self._micro_batches % self.micro_batches_per_step == 0

    def next_batch(self, iterator: Any) -> Any:
        """The iterator's next element; call it at the start of each micro-batch, in the compiled step."""
        with tf.device("CPU"):
            is_first = self.begins_step()
            with tf.control_dependencies([is_first]):
                start = _now()
            with tf.control_dependencies([start]):
                batch = iterator.get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                waited = _now() - start
            # No computation may start before the time is taken: reading the clock could be queued behind it.
            with tf.control_dependencies([waited]):
                batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
            self._input = start, waited
            if self.micro_batches_per_step > 1:
                self._start.assign(tf.where(is_first, start, self._start))
                self._waited.assign(tf.where(is_first, waited, self._waited + waited))
                self._input = self._start, self._waited
        return batch

    def record_reduction(self, sent: Sequence[tf.Tensor], after: tf.Tensor) -> None:
        """Records the times of a reduction; call it in the compiled step.

        Args:
            sent: this rank's gradients, as they are passed to the reduction.
            after: a value computed from all reduced gradients. A control dependency on them is not enough: Horovod
                reduces in a function, and the dependency would not wait for its end.
        """
        with tf.device("CPU"):
            with tf.control_dependencies(_computed(sent)):
                ready = _now()
            with tf.control_dependencies([ready, *_computed([after])]):
                done = _now()
            self._ready.assign(ready)
            self._reducing.assign(done - ready)

    def record_computation(self) -> None:
        """Records the time of a step that reduces nothing; call it in the compiled step, after the update.

        On a GPU, which has by then only been asked to compute, it is too short.
        """
        with tf.device("CPU"):
            self._ready.assign(_now())
            self._reducing.assign(tf.constant(0.0, tf.float64))

    def end_micro_batch(self) -> None:
        """Counts a micro-batch; call it at its end, in the compiled step."""
        with tf.device("CPU"):
            # Rows of micro-batches that complete no step are overwritten by the next.
            row = self._completed_steps() % _CAPACITY
            start, waited = self._input
            times = tf.stack([waited, self._ready - start, self._reducing])
            self._rows.scatter_update(tf.IndexedSlices(times, row))
            self._micro_batches.assign_add(1)

    def drain(self) -> np.ndarray:
        """The steps since the last call, at most 1,024, shape ``[steps, 3]``, in seconds.

        Columns: waiting for input, from the start until all gradients are computed, and reducing them. Steps without
        a reduction (an overflow was skipped) have NaN in the last two.
        """
        steps = self.state()
        numbers = np.arange(max(self._drained, steps - _CAPACITY), steps)
        self._drained = steps
        rows = self._rows.numpy()[numbers % _CAPACITY]
        rows[rows[:, 1] < 0, 1:] = np.nan
        return rows


class TimeShares:
    """Combines the step times of all ranks: fractions of a step, and which rank the others wait for."""

    def __init__(self, times: StepTimes, collectives: Collectives, host: str):
        self._times = times
        self._collectives = collectives
        self._host = host
        self.all_steps: list[np.ndarray] = []
        """What was exchanged so far: of each exchange, what :meth:`StepTimes.drain` returned, ``[ranks, steps, 3]``."""

    @property
    def micro_batches(self) -> int:
        """See :attr:`StepTimes.micro_batches`."""
        return self._times.micro_batches

    def restart(self) -> None:
        """Forgets the steps so far: other ranks made them."""
        self._times.drain()
        self.all_steps.clear()

    def exchange(self) -> None:
        """Gathers the step times before they are overwritten; all ranks must call it every 512 steps."""
        self.all_steps.append(np.stack(self._collectives.allgather(self._times.drain())))

    def summary(self, step_ms: float, remedies: Collection[str] = REMEDIES) -> dict[str, Any]:
        """Fractions of a step of ``step_ms`` milliseconds on average, and the skew; all ranks must call it.

        Args:
            remedies: the remedies that may be recommended.
        """
        self.exchange()
        hosts = self._collectives.allgather(self._host)
        times = np.concatenate(self.all_steps, axis=1)
        times = times[:, ~np.isnan(times).any(axis=(0, 2))]
        if times.shape[1] > 1:
            times = times[:, 1:]  # the first step compiles
        if not times.size:
            return {"input_fraction": 0.0, "compute_fraction": 1.0, "communication_fraction": 0.0, "skew": None}
        waited, ready, reducing = (times[:, :, i] for i in range(3))
        whole_s = max(step_ms / 1000, float(np.median(np.median(ready + reducing, axis=1))))
        input_fraction = float(np.median(waited)) / whole_s
        communication_fraction = 0.0 if len(hosts) == 1 else float(np.median(reducing)) / whole_s
        return {
            "input_fraction": input_fraction,
            "compute_fraction": max(0.0, 1 - input_fraction - communication_fraction),
            "communication_fraction": communication_fraction,
            "skew": None if len(hosts) == 1 else skew(ready, hosts, remedies),
        }


def skew(ready: np.ndarray, hosts: Sequence[str], remedies: Collection[str] = REMEDIES) -> dict[str, Any]:
    """Which rank is the last to finish its gradients, how often, and what waiting for it costs.

    Args:
        ready: seconds until a rank has the gradients of a step; shape ``[ranks, steps]``.
        hosts: the host of each rank.
        remedies: the remedies that may be recommended.
    """
    last = np.bincount(np.argmax(ready, axis=0), minlength=len(hosts))
    slowest = int(np.argmax(last))
    medians = np.median(ready, axis=1)
    return {
        "slowest_rank": slowest,
        "slowest_host": hosts[slowest],
        "slowest_share": float(last[slowest] / last.sum()),
        "ratio": float(medians[slowest] / np.median(medians)),
        "remedy": remedy(ready, remedies),
    }
