"""Checks the steps of ``model.fit`` and ``model.train_on_batch``."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed import runtime
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.training.equality.model_check import check_of_model
from hvdtrain.training.equality.scheduled_check import ScheduledCheck

_make_train_function_here = keras.Model.make_train_function
_checks: weakref.WeakSet[ScheduledCheck] = weakref.WeakSet()


def restart_checks() -> None:
    """Begins the checks of all models again: other ranks train together, some of which have checked nothing."""
    for check in _checks:
        check.restart()


def _make_checked_train_function(self: Any, force: bool = False) -> None:
    is_made = self.train_function is not None and not force
    _make_train_function_here(self, force)
    pipelines = [] if is_made else pipelines_of(self)
    if not pipelines:
        return
    _, pipeline = pipelines[0]
    ranks, on_unequal = pipeline.reduce.collectives, runtime.on_unequal()
    check = check_of_model(
        self,
        pipeline.batches,
        ranks,
        on_unequal=on_unequal,
        how_to_continue=f"call hvdtrain.{'elastic.' if ranks.may_change else ''}init(on_unequal='warn')",
        report=_print,
        weighs_micro_batches=False,
    )
    if check is not None:
        _checks.add(check)
        self.train_function = _checking(check, self.train_function)


keras.Model.make_train_function = _make_checked_train_function


def _checking(check: ScheduledCheck, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(run)
    def run_and_check(iterator: Any) -> Any:
        check.before_call()
        logs = run(iterator)
        check.after_call()
        return logs

    return run_and_check


def _print(text: str) -> None:
    print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
