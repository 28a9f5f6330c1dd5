"""Detects that no rank makes progress, and which ranks the others wait for."""

import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from hvdtrain.fault_tolerance.user_code import is_of_the_user
from hvdtrain.seams.tensorflow_internals import EXECUTE
from hvdtrain.system.terminal import some_of

_MAX_FRAMES = 8
_ELSEWHERE = "in another thread: "
# Parts of the last line of a stack: the call of a compiled function, or of an operation of Horovod or MPI.
_OPERATIONS = (
    f"{EXECUTE.module.replace('.', '/')}.py:",
    ", in horovod_",
    "/horovod/tensorflow/mpi_ops.py:",
    "/hvdtrain/distributed/horovod.py:",
)
# Parts of one of the last lines: a wait for another thread, or for a message, either of which may wait for other ranks.
_WAITS = (
    "/hvdtrain/system/background.py:",
    "/hvdtrain/fault_tolerance/channel.py:",
    "/hvdtrain/training/quorum/exchange.py:",
)
_FRAMES_OF_A_WAIT = 3
"""With those of the standard library, such as of ``Thread.join``."""


class Position(NamedTuple):
    """A rank's latest heartbeat."""

    heartbeats: int = 0
    """Number of heartbeats so far; equal on all ranks that have made the same progress."""
    where: str = ""
    step: int | None = None
    transfers: int = 0
    """What it has moved to and from object stores; see :mod:`hvdtrain.system.transfers`."""

    @property
    def at_step(self) -> str:
        """The step, as part of a sentence."""
        return "before its first step" if self.step is None else f"at step {self.step}"

    def __str__(self) -> str:
        return f"{self.at_step} ({self.where})" if self.where else self.at_step


def stack_of(thread: int) -> list[str]:
    """Returns the innermost frames of a thread, the most recent call last, and those of user code in other threads.

    TensorFlow calls functions of the input, such as generators, in its own threads: the main thread then waits in
    TensorFlow, on all ranks alike. Does not read source files: the thread may be waiting for the file system that
    holds them.
    """
    frames = sys._current_frames()
    own = frames.pop(thread, None)
    lines = [] if own is None else _lines_of(own)
    for frame in frames.values():
        if any(is_of_the_user(each.f_code.co_filename) for each, _ in traceback.walk_stack(frame)):
            lines += [f"{_ELSEWHERE}{line}" for line in _lines_of(frame)]
    return lines


def _lines_of(frame: FrameType) -> list[str]:
    walked = list(traceback.walk_stack(frame))[:_MAX_FRAMES]
    return [f"{each.f_code.co_filename}:{line}, in {each.f_code.co_name}" for each, line in reversed(walked)]


def may_wait_for_others(stack: list[str]) -> bool:
    """Whether a thread is in an operation of TensorFlow, Horovod or MPI, or waits: in both it may wait for other ranks.

    Args:
        stack: what :func:`stack_of` returns.
    """
    own = [line for line in stack if not line.startswith(_ELSEWHERE)]
    if not own or len(own) < len(stack):
        return False
    is_waiting = any(each in line for line in own[-_FRAMES_OF_A_WAIT:] for each in _WAITS)
    return is_waiting or any(each in own[-1] for each in _OPERATIONS)


class StallDetector:
    """Measures on rank 0 how long no rank has made progress, and collects the ranks' stacks.

    Args:
        now: the current time of a monotonic clock, as in all methods.
    """

    def __init__(self, now: float):
        self._since = now
        self._progress: dict[int, tuple[int, int]] = {}
        self._stacks: dict[int, tuple[Position, list[str]]] = {}
        self.stacks_requested = False

    def update(self, rank: int, position: Position, now: float) -> None:
        """Records a rank's position; a new one ends the stall."""
        progress = position.heartbeats, position.transfers
        if self._progress.get(rank, (0, 0)) != progress:
            self._progress[rank] = progress
            self.reset(now)

    def reset(self, now: float) -> None:
        """Restarts the measurement."""
        self._since = now
        self._stacks = {}
        self.stacks_requested = False

    def extend(self, gap_s: float) -> None:
        """Excludes a time for which this process did not run."""
        self._since += gap_s

    def stalled_s(self, now: float) -> float:
        """Returns how long no rank has made progress."""
        return now - self._since

    def add_stack(self, rank: int, position: Position, stack: list[str]) -> None:
        """Records the stack of a rank's main thread."""
        self._stacks[rank] = (position, stack)

    @property
    def num_stacks(self) -> int:
        """The number of ranks whose stack is known."""
        return len(self._stacks)

    def ranks_behind(self) -> list[int]:
        """Returns the ranks that the others wait for; empty if no rank stands out.

        They have made less progress than others or, where all have made the same, do not wait as others do: one that
        waits in a reduction is ahead of those that have not reached it.
        """
        progress = {
            rank: (position.heartbeats, may_wait_for_others(stack)) for rank, (position, stack) in self._stacks.items()
        }
        least = min(progress.values())
        behind = sorted(rank for rank, each in progress.items() if each == least)
        return behind if len(behind) < len(progress) else []

    def report(self, name: Callable[[int], str]) -> str:
        """Returns the stacks of the ranks that are behind, or of all ranks if none is; one line per frame."""
        # Ranks with the same stack are listed together, so that a rank with a different one stands out.
        ranks_by_stack: dict[tuple[str, ...], list[str]] = {}
        for rank in self.ranks_behind() or sorted(self._stacks):
            position, stack = self._stacks[rank]
            ranks_by_stack.setdefault((str(position), *stack), []).append(name(rank))
        lines: list[str] = []
        for (position_text, *frames), ranks in ranks_by_stack.items():
            lines += [f"  {some_of(ranks)} {position_text}:", *(f"    {frame}" for frame in frames)]
        return "\n".join(lines)
