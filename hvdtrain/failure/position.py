"""How far the ranks' main threads have come, and whether they still move."""

import sys
import traceback
from typing import NamedTuple

_FRAMES = 8


class Position(NamedTuple):
    """What a rank's main thread said last."""

    beats: int = 0
    """How often it has said something; the same on all ranks that have come equally far."""
    where: str = ""
    step: int | None = None

    @property
    def at_step(self) -> str:
        """The step, for a sentence."""
        return "before its first step" if self.step is None else f"at step {self.step}"

    def __str__(self) -> str:
        return f"{self.at_step} ({self.where})" if self.where else self.at_step


def stack_of(thread: int) -> list[str]:
    """The innermost frames of a thread, the latest call last.

    Sources are not read: a file system that hangs may be what the thread waits for.
    """
    frame = sys._current_frames().get(thread)
    walked = [] if frame is None else list(traceback.walk_stack(frame))[:_FRAMES]
    return [f"{each.f_code.co_filename}:{line}, in {each.f_code.co_name}" for each, line in reversed(walked)]


class Standstill:
    """Rank 0 measures for how long no rank has moved on, and asks all where they are.

    Args:
        now: by ``time.monotonic()``, as everywhere here.
    """

    def __init__(self, now: float):
        self._since = now
        self._beats: dict[int, int] = {}
        self._answers: dict[int, tuple[Position, list[str]]] = {}
        self.is_asked = False

    def note(self, rank: int, position: Position, now: float) -> None:
        """Takes a rank's position; one that has moved on since the last time ends the standstill."""
        if self._beats.get(rank, 0) != position.beats:
            self._beats[rank] = position.beats
            self.moved(now)

    def moved(self, now: float) -> None:
        """Begins to measure anew."""
        self._since = now
        self._answers = {}
        self.is_asked = False

    def forgive(self, gap_s: float) -> None:
        """Leaves out a time in which this process did not run."""
        self._since += gap_s

    def lasts_s(self, now: float) -> float:
        """For how long no rank has moved on."""
        return now - self._since

    def answer(self, rank: int, position: Position, stack: list[str]) -> None:
        """Takes a rank's answer to the question where it is."""
        self._answers[rank] = (position, stack)

    @property
    def num_answers(self) -> int:
        """How many ranks have said where they are."""
        return len(self._answers)

    def culprits(self) -> list[int]:
        """The ranks that have come less far than others; none where all have come equally far."""
        fewest = min(position.beats for position, _ in self._answers.values())
        behind = [rank for rank, (position, _) in sorted(self._answers.items()) if position.beats == fewest]
        return behind if len(behind) < len(self._answers) else []

    def told(self, names: dict[int, str]) -> str:
        """Where the culprits are, or all ranks where none is known; a line for each frame."""
        # Ranks that wait at the same place are told together: the one that is elsewhere stands out.
        places: dict[tuple[str, ...], list[str]] = {}
        for rank in self.culprits() or sorted(self._answers):
            position, stack = self._answers[rank]
            places.setdefault((str(position), *stack), []).append(names[rank])
        lines: list[str] = []
        for (position_text, *frames), ranks in places.items():
            lines += [f"  {', '.join(ranks)} {position_text}:", *(f"    {frame}" for frame in frames)]
        return "\n".join(lines)
