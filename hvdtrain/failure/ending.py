"""An error ends the job on every rank, with its cause told once."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from hvdtrain import process
from hvdtrain.errors import DisagreementError, DivergenceError, HvdtrainError, NonFiniteError, StoppedEarly

if TYPE_CHECKING:
    # TensorFlow comes with it, which this package does without.
    from hvdtrain.collectives import Collectives
    from hvdtrain.failure.watch import JobWatch

Result = TypeVar("Result")

# How long the cause of an echo may take to be told by the rank that knows it.
_CAUSE_S = 3.0


class JobError(HvdtrainError):
    """An error that one rank met and that every rank now raises."""

    def __init__(self, message: str, *, exit_code: int, rank: int):
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


def on_every_rank(action: Callable[[], Result], collectives: "Collectives") -> Result:
    """Runs a local action on all ranks; where it fails on one, it fails on all, with the same error.

    Rank 1 cannot read its data and goes; without this, rank 0 would wait in its next collective for ever.

    Raises:
        JobError: on every rank, with the lowest failing rank's message.
    """
    result: Result | None = None
    failed: Exception | None = None
    try:
        result = action()
    except JobError:
        # Every rank raises it already; gathering once more would wait for those that met it elsewhere.
        raise
    except Exception as error:
        failed = error
    # One small message where all is well, for it is made often, and networks may be slow.
    (num_failed,) = collectives.sum([np.array(failed is not None, np.float32)])
    if num_failed:
        report = None if failed is None else (describe(failed), exit_code_of(failed))
        for rank, each in enumerate(collectives.allgather(report)):
            if each is not None:
                message, exit_code = each
                raise JobError(message, exit_code=exit_code, rank=rank) from failed
    return result  # type: ignore[return-value]


def on_first_rank(action: Callable[[], Result], collectives: "Collectives") -> Result:
    """Runs an action on rank 0 alone and gives every rank its result, which must be picklable.

    Raises:
        JobError: on every rank, where it fails.
    """
    result = on_every_rank(lambda: action() if collectives.rank == 0 else None, collectives)
    return collectives.allgather(result)[0]


def exit_code_of(error: BaseException) -> int:
    """The documented exit code of an error: 1 for any that is not ours."""
    return error.exit_code if isinstance(error, HvdtrainError) else 1


def describe(error: BaseException) -> str:
    """The message of an error of ours; of any other its class and traceback too, for it is not ours to interpret."""
    if isinstance(error, HvdtrainError):
        return str(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}"


def end_job(
    error: Exception,
    collectives: "Collectives | None",
    step: int | None = None,
    watch: "JobWatch | None" = None,
) -> NoReturn:
    """Tells the cause once and ends this process with the error's exit code.

    An error that every rank raises is told by one of them, and all end together. One that this rank
    alone has met ends the process at once, without waiting for the others: the watch ends them, or,
    where there is none, the launcher.

    Args:
        step: how many steps were made.
        watch: not closed yet.
    """
    code = exit_code_of(error)
    if collectives is None or collectives.size == 1:
        write(f"hvdtrain: {describe(error)}")
        if watch is not None:
            watch.do_last_work()
            watch.close()
        raise SystemExit(code)
    is_of_one_rank = isinstance(error, NonFiniteError) and error.rank is not None
    together = JobError | DisagreementError | DivergenceError | NonFiniteError | StoppedEarly
    if isinstance(error, together) and not is_of_one_rank:
        speaker = error.rank if isinstance(error, JobError) else 0
        if collectives.rank == speaker:
            tell(speaker, str(error))
        if watch is not None:
            watch.do_last_work()
        collectives.barrier()  # a launcher kills all ranks when the first one ends: not before it was told
        if watch is not None:
            watch.close()
        raise SystemExit(code)
    if watch is not None:
        watch.wait_for_cause(_CAUSE_S if _is_echo(error) else 0.0)
    where = "" if step is None else f" at step {step}"
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    # The message of an error of ours says all; of any other the traceback is needed.
    trace = "" if isinstance(error, HvdtrainError) else "\n" + "".join(traceback.format_exception(error)).rstrip()
    write(f"hvdtrain: {place(collectives.rank)} failed{where}: {cause}{trace}")
    if watch is not None:
        watch.fail(code)
    os._exit(code)


def _is_echo(error: Exception) -> bool:
    """True for what Horovod raises on the other ranks when one has ended, though not only then."""
    return not isinstance(error, HvdtrainError) and "Horovod" in f"{type(error).__name__}: {error}"


def tell(rank: int, text: str) -> None:
    """Writes what a rank has to say to a person, on stderr: a rank other than 0 has no reporter."""
    write(f"hvdtrain: {place(rank)}: {text}")


def place(rank: int, host: str | None = None) -> str:
    """A rank, for a person; of this host where no other is given."""
    return f"rank {rank} (host {host or process.host_name()})"


def write(text: str) -> None:
    """Writes a line or more to stderr."""
    # One write: launchers tag and mix the output of ranks line by line.
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run_for(seconds: float, action: Callable[[], None]) -> None:
    """Runs an action that may hang, such as writing to a pipe that nobody reads, and waits for it so long."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
