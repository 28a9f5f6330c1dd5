"""Raises an error of one rank on all ranks."""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.fault_tolerance.user_code import is_of_the_user

if TYPE_CHECKING:
    # That module imports TensorFlow, which this package does not depend on.
    from hvdtrain.distributed.collectives import Collectives

Result = TypeVar("Result")


def on_every_rank(action: Callable[[], Result], collectives: "Collectives") -> Result:
    """Runs a local action on all ranks; if it fails on one, raises the same error on all. Collective.

    Without this, if rank 1 cannot read its data and exits, rank 0 waits in its next collective forever.

    Raises:
        JobError: on all ranks, with the message of the lowest failing rank.
    """
    result: Result | None = None
    failed: Exception | None = None
    try:
        result = action()
    except JobError:
        # All ranks already raise it; another allgather would wait for ranks that raised it elsewhere.
        raise
    except Exception as error:
        failed = error
    # Called often, and networks may be slow: one small message in the common case.
    (num_failed,) = collectives.sum([np.array(failed is not None, np.float32)])
    if num_failed:
        report = None if failed is None else (describe(failed), exit_code_of(failed))
        for rank, each in enumerate(collectives.allgather(report)):
            if each is not None:
                message, exit_code = each
                raise JobError(message, exit_code=exit_code, rank=rank) from failed
    return result  # type: ignore[return-value]


def on_first_rank(action: Callable[[], Result], collectives: "Collectives") -> Result:
    """Runs an action on rank 0 only and returns its picklable result on all ranks. Collective.

    Raises:
        JobError: on all ranks, if it fails.
    """
    result = on_every_rank(lambda: action() if collectives.rank == 0 else None, collectives)
    return collectives.allgather(result)[0]


def exit_code_of(error: BaseException) -> int:
    """Returns the documented exit code of an error; 1 if hvdtrain does not define the error."""
    return error.exit_code if isinstance(error, HvdtrainError) else 1


def describe(error: BaseException) -> str:
    """Returns an error's message, with class and traceback unless hvdtrain defines the error."""
    if isinstance(error, HvdtrainError):
        return str(error)
    return f"{type(error).__name__}: {error}\n{trace_of(error)}"


def trace_of(error: BaseException) -> str:
    """An error's traceback; first the lines of the user's own program, if libraries have others in between."""
    whole = "".join(traceback.format_exception(error)).rstrip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_of_the_user(frame.filename)]
    if not own or len(own) == len(frames):
        return whole
    return f"In your program (most recent call last):\n{''.join(traceback.format_list(own)).rstrip()}\n\n{whole}"
