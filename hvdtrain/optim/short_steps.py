"""A line at the end of a long ``model.fit`` that made many short steps, each in a separate call."""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.system.terminal import write

_SHORT_MS = 5.0
"""For shorter steps, calling TensorFlow takes as long as computing."""
_LONG_S = 600.0


def with_line_about_short_steps(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``keras.Model.fit``, which names ``hvdtrain.autotune`` on rank 0 if a distributed model may gain from it.

    It promises no gain, because none is measured. The time of a step includes all that ``fit`` does.
    """

    @functools.wraps(fit)
    def fit_and_tell(model: keras.Model, *arguments: Any, **named: Any) -> Any:
        pipelines = pipelines_of(model)
        if not pipelines or pipelines[0][1].reduce.collectives.rank != 0 or model.steps_per_execution != 1:
            return fit(model, *arguments, **named)
        start_s, before = time.perf_counter(), _steps_of(model)
        result = fit(model, *arguments, **named)
        seconds, steps = time.perf_counter() - start_s, _steps_of(model) - before
        if steps and seconds >= _LONG_S and (step_ms := 1000 * seconds / steps) < _SHORT_MS:
            write(
                f"hvdtrain: model.fit made {steps:,} steps, in {step_ms:.2g} ms each. hvdtrain.autotune measures "
                "whether they are shorter with several in one call, model.compile(…, steps_per_execution=…)"
            )
        return result

    return fit_and_tell


def _steps_of(model: keras.Model) -> int:
    return int(leaves_of(model)[0].iterations)
