"""Ends the job after an error: one rank reports the cause, and all ranks exit with the error's code."""

import os
from typing import TYPE_CHECKING, NoReturn

from hvdtrain.errors import (
    DisagreementError,
    DivergenceError,
    HvdtrainError,
    JobError,
    NonFiniteError,
    StoppedEarly,
)
from hvdtrain.fault_tolerance.collective_errors import describe, exit_code_of, trace_of
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import error_text
from hvdtrain.system.terminal import rank_name, report, write

if TYPE_CHECKING:
    # That module imports TensorFlow, which this package does not depend on.
    from hvdtrain.distributed.collectives import Collectives

# How long a rank with a secondary error waits for the rank with the cause to report it.
_CAUSE_S = 3.0
# Errors of Gloo reach TensorFlow unchanged: they name a source file in third_party/gloo/gloo or compatible17_gloo/gloo.
_IN_HOROVOD_ERRORS = ("Horovod", "gloo/gloo/")


def end_job(
    error: Exception,
    collectives: "Collectives | None",
    step: int | None = None,
    watch: "JobWatch | None" = None,
) -> NoReturn:
    """Reports the cause once and ends this process with the error's exit code.

    If all ranks raise the error, one of them reports it and all end together. If only this rank raises it, this
    process ends at once without waiting for the others: the watch ends them, or the launcher if there is no watch.

    Args:
        step: the number of completed steps.
        watch: still open.
    """
    code = exit_code_of(error)
    if collectives is None or collectives.size == 1:
        write(f"hvdtrain: {describe(error)}")
        if watch is not None:
            watch.run_exit_actions()
            watch.close(ends_process=True, exit_code=code)
        raise SystemExit(code)
    is_on_one_rank = isinstance(error, NonFiniteError) and error.rank is not None
    collective = JobError | DisagreementError | DivergenceError | NonFiniteError | StoppedEarly
    if isinstance(error, collective) and not is_on_one_rank:
        reporter = error.rank if isinstance(error, JobError) else 0
        if collectives.rank == reporter:
            report(reporter, str(error))
        if watch is not None:
            watch.run_exit_actions()
        # A launcher kills all ranks when the first one ends: the error must have been reported by then.
        collectives.barrier()
        if watch is not None:
            watch.close(ends_process=True, exit_code=code)
        raise SystemExit(code)
    if watch is not None:
        watch.wait_for_cause(_CAUSE_S if is_secondary(error) else 0.0)
    where = "" if step is None else f" at step {step}"
    cause = error_text.class_and_message(error)
    # Messages of hvdtrain's errors are self-contained; other errors need their traceback.
    trace = "" if isinstance(error, HvdtrainError) else "\n" + trace_of(error)
    write(f"hvdtrain: {rank_name(collectives.rank)} failed{where}: {cause}{trace}")
    if watch is not None:
        watch.fail(code)
    os._exit(code)


def is_secondary(error: Exception) -> bool:
    """Whether Horovod may have raised the error because another rank ended."""
    text = f"{type(error).__name__}: {error}"
    return not isinstance(error, HvdtrainError) and any(each in text for each in _IN_HOROVOD_ERRORS)
