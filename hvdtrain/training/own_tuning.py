"""``hvdtrain.autotune``: how many steps ``model.fit`` should make in one call of TensorFlow."""

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import require_keras_model
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.optim.learning_rate import hold_weights
from hvdtrain.optim.pipeline import require_pipelines
from hvdtrain.system.terminal import write
from hvdtrain.training.step_trials import STEPS_PER_EXECUTION, TimedSteps, fastest, interleaved
from hvdtrain.training.temporary_models import temporary_models


def autotune(make_model: Callable[[], keras.Model], batch: Any, *, collectives: Collectives | None = None) -> int:
    """Measures how many steps ``model.fit`` makes fastest in one call of TensorFlow: 1, 4 or 16.

    For ``model.compile(…, steps_per_execution=…)``. The calls are measured in turn, on all ranks at the same time, with
    the compiled steps of three temporary models. Rank 0 prints what was measured. Weights do not depend on the
    number, but callbacks at batches are called once for all steps of a call. Training is not affected by the
    measurement. All ranks must call it. It takes some five
    seconds in addition to compiling three times.

    Args:
        make_model: makes and compiles a model as it will be trained, with a distributed optimizer.
        batch: one of this rank's batches, ``(x, y)`` or ``(x, y, sample_weight)``, as ``model.fit`` receives them from
            a data set.

    Returns:
        The number of steps, the same on every rank; 1 unless another makes them at least 2 % shorter.

    Raises:
        JobError: on every rank: the model is not compiled, or with ``run_eagerly=True``, or its optimizer is not
            distributed.
        UsageError: the job is elastic: a process that joins would measure alone.
    """
    collectives = collectives or runtime.current().collectives
    if collectives.may_change:
        exclusions.require_compatible(exclusions.facts_from(exclusions.ELASTIC, exclusions.AUTOTUNE))
    with temporary_models():
        trials = [_CallsOfFit(make_model, batch, steps, collectives) for steps in STEPS_PER_EXECUTION]
        seconds = interleaved(trials)
        del trials
    best = fastest(seconds)
    if collectives.rank == 0:
        write(f"hvdtrain: {_summary(seconds, best)}")
    return STEPS_PER_EXECUTION[best]


class _CallsOfFit:
    """The calls that ``model.fit`` makes, of one model, with one batch. Collective."""

    def __init__(self, make_model: Callable[[], keras.Model], batch: Any, steps: int, collectives: Collectives):
        start_s = time.perf_counter()
        self._call = steps
        self._model = on_every_rank(lambda: _held_model(make_model, steps), collectives)
        self._model.make_train_function(force=True)
        self._batches = iter(tf.data.Dataset.from_tensors(batch).repeat())
        self._steps = TimedSteps(self._run, steps, collectives, start_s=start_s)
        self.measure = self._steps.measure

    def _run(self, steps: int) -> None:
        for _ in range(steps // self._call):
            logs = self._model.train_function(self._batches)
        # A GPU computes on after the call.
        tf.nest.map_structure(lambda value: value.numpy(), logs)


def _held_model(make_model: Callable[[], keras.Model], steps: int) -> keras.Model:
    model = make_model()
    require_keras_model(model)
    if not model.compiled or model.run_eagerly:
        received = "one with run_eagerly=True" if model.compiled else "one that is not compiled"
        raise UsageError(
            f"make_model must return a model whose steps are compiled. Received: {received}. Call model.compile(…) in "
            "make_model, without run_eagerly."
        )
    require_pipelines(model)
    hold_weights(model)
    model.steps_per_execution = steps
    return model


def _summary(seconds: list[float], best: int) -> str:
    times = ", ".join(
        f"{1000 * each:.3g} ms with {steps}" for steps, each in zip(STEPS_PER_EXECUTION, seconds, strict=True)
    )
    gain = f"steps {1 - seconds[best] / seconds[0]:.0%} shorter" if best else "no other number makes steps shorter"
    return f"steps_per_execution={STEPS_PER_EXECUTION[best]}: {gain} (a step takes {times})"
