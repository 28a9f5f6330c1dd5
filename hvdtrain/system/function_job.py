"""``hvdtrain.run``: calls a function on several ranks of this machine, from Python and notebooks."""

import codecs
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import psutil

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system import function_pickling, function_rank
from hvdtrain.system.local_job import Controller, Launch, make_launch
from hvdtrain.system.processes import end_processes
from hvdtrain.system.tensorflow_start import is_startup_message, without_startup_messages

_KEPT_LINES = 30
_POLL_S = 0.05


class RankError(Exception):
    """The traceback of a rank, as text: the cause of the error that :func:`run` raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class Failure(NamedTuple):
    """An error of a rank."""

    time_ns: int
    rank: int
    text: str
    error: BaseException | None
    """None: it could not be sent."""


def run(
    function: Callable[..., Any],
    np: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    controller: Controller = "auto",
    timeout_s: float | None = None,
    quiet: bool = False,
) -> list[Any]:
    """Calls a function on ``np`` ranks of this machine and returns the result of each.

    Every rank is a new process, in which the function calls :func:`hvdtrain.init`. It may be a lambda or a closure;
    it, its arguments and its results are sent by cloudpickle. What rank 0 prints is printed here at once, and lines of
    other ranks after their number; also in the cell of a notebook, where an interrupt ends all ranks.

    Args:
        function: called as ``function(*args, **kwargs)``.
        np: number of ranks.
        controller: ``mpi``, ``gloo``, or ``auto``: MPI if Horovod was built with it.
        timeout_s: seconds after which the job is ended (default: never).
        quiet: print nothing; the end of what ranks print is part of the error if they end without a result.

    Returns:
        The results, by rank.

    Raises:
        HvdtrainError: the job ended without a result of each rank, or Horovod is not installed.
        UsageError: an argument breaks its rule, or this process is itself a rank.
        Exception: that of the rank that failed first, with that rank's traceback as its cause; the others are ended.
    """
    if not callable(function):
        raise UsageError(f"function must be callable. Received: a {type(function).__name__}")
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UsageError(f"np must be a whole number of at least 1. Received: {np!r}")
    try:
        call = function_pickling.dumps((function, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise UsageError(
            "run() sends the function and its arguments to other processes, for which they must be picklable. "
            f"Received: {type(error).__name__}: {error}. Create what cannot be sent, such as models and files, inside "
            "of the function."
        ) from error
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-") as name:
        folder = Path(name)
        (folder / function_rank.CALL).write_bytes(call)
        (folder / function_rank.PATHS).write_text(json.dumps(sys.path))
        # By its path: hvdtrain may be importable only with this process's sys.path.
        job = make_launch([sys.executable, function_rank.__file__, str(folder)], np, controller)
        output = RankOutput(folder, np, prints=not quiet)
        code, ending = _execute(job, timeout_s, output)
        outcomes = [_read_outcome(folder, rank) for rank in range(np)]
    failures = [each for each in outcomes if isinstance(each, Failure)]
    if failures:
        first = min(failures)
        cause = RankError(f"rank {first.rank} of {np}:\n{first.text}")
        raise (first.error or HvdtrainError(f"rank {first.rank} failed: {first.text.splitlines()[-1]}")) from cause
    missing = [str(rank) for rank, outcome in enumerate(outcomes) if outcome is None]
    if missing or code != 0:
        raise HvdtrainError(
            f"each rank must return a result. Received: none of rank {', '.join(missing)}; the job ended with exit "
            f"code {code}.\n{ending}"
        )
    return [outcome[0] for outcome in outcomes if outcome is not None]


class RankOutput:
    """Prints what ranks write to their files.

    Args:
        prints: otherwise, the last lines are kept.
    """

    def __init__(self, folder: Path, num_ranks: int, *, prints: bool):
        self._paths = [folder / function_rank.output_name(rank) for rank in range(num_ranks)]
        self._read_bytes = [0] * num_ranks
        # A read may end within a character.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_ranks)]
        self._prints = prints
        self.kept: deque[str] = deque(maxlen=_KEPT_LINES)

    def forward(self, *, is_last: bool = False) -> None:
        """Prints what is new: of rank 0 everything, of others whole lines."""
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[rank])
                new = file.read()
            if rank > 0 and not is_last:
                new = new[: new.rfind(b"\n") + 1]
            self._read_bytes[rank] += len(new)
            # Of functions that import TensorFlow before hvdtrain.init.
            decoded = self._decoders[rank].decode(new, final=is_last)
            lines = [each for each in decoded.splitlines(True) if not is_startup_message(each)]
            text = "".join(lines if rank == 0 else (f"rank {rank}: {each.rstrip()}\n" for each in lines))
            if text and self._prints:
                print(text, end="", flush=True)
            elif text:
                self.kept.extend(text.splitlines(keepends=True))


def _execute(job: Launch, timeout_s: float | None, output: RankOutput) -> tuple[int, str]:
    """Runs a job and prints what its ranks print; returns its exit code and the last lines that were not printed."""
    process = subprocess.Popen(
        job.command,
        env=job.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # An interrupt of a notebook reaches this process only, which ends the job.
    )
    assert process.stdout is not None
    # A launcher describes the end of a failed job on a screen of lines; the error of the rank says it better.
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    reader = threading.Thread(target=last.extend, args=(process.stdout,), daemon=True)
    reader.start()
    with _ended_after(process, timeout_s) as has_timed_out:
        while reader.is_alive():
            reader.join(_POLL_S)
            output.forward()
        code = process.wait()
    output.forward(is_last=True)
    last.extend(output.kept)
    if has_timed_out.is_set():
        raise HvdtrainError(
            f"the job must end within {timeout_s:g} s. Received: no end. It was ended.\n{''.join(last)}"
        )
    return code, "".join(last)


@contextlib.contextmanager
def _ended_after(process: "subprocess.Popen[str]", timeout_s: float | None) -> Iterator[threading.Event]:
    """Ends a process with its descendants after a timeout, and when the block is left early."""
    has_timed_out = threading.Event()

    def end() -> None:
        if process.poll() is None:
            has_timed_out.set()
            launcher = psutil.Process(process.pid)
            # horovodrun has become a shell, which passes no signal on.
            end_processes([launcher, *launcher.children(recursive=True)])

    timer = threading.Timer(timeout_s, end) if timeout_s is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield has_timed_out
    finally:
        if timer is not None:
            timer.cancel()
        end()


def _read_outcome(folder: Path, rank: int) -> tuple[Any] | Failure | None:
    """A rank's result in a tuple, or its failure; None if it has left neither."""
    path = folder / function_rank.outcome_name(rank)
    if not path.exists():
        return None
    time_ns, pickled, text = cloudpickle.loads(path.read_bytes())
    # A model, or an error of TensorFlow, imports it here.
    quietly = contextlib.nullcontext() if "tensorflow" in sys.modules else without_startup_messages()
    try:
        with quietly:
            value = cloudpickle.loads(pickled) if pickled is not None else None
    except Exception as error:  # Such as that of an exception whose constructor takes other arguments than its args.
        if text is None:
            raise HvdtrainError(f"the result of rank {rank} cannot be read here: {error}") from error
        value = None
    return (value,) if text is None else Failure(time_ns, rank, text, value)
