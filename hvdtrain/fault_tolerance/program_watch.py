"""What the ranks of a user's program tell each other: that they end, and where they are while none makes a step."""

import re
import selectors
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from hvdtrain.fault_tolerance.channel import Channel, Connection, Message
from hvdtrain.fault_tolerance.stall_detection import Position, StallDetector, stack_of
from hvdtrain.system.terminal import rank_name, some_of, write

# A rank that computes is elsewhere each time; one that waits, or is stuck, is not.
_NUM_LOOKS = 3
_LOOKS_PER_TIMEOUT = 12
_MAX_ANSWER_SHARE = 0.5
_LINE_NUMBER = re.compile(r":\d+, in ")


class _Look(NamedTuple):
    """Where a rank was at one time."""

    num_steps: int
    standing_s: float
    """How long it has made no step."""
    stack: list[str]

    @property
    def functions(self) -> list[str]:
        return [_LINE_NUMBER.sub(", in ", line) for line in self.stack]


class ProgramWatch:
    """Receives the other ranks' messages on a thread of its own, and never ends the process.

    Rank 0 is the hub: it is connected to all other ranks, and reports, in one message, which rank the others wait for.

    Args:
        num_steps: returns how many steps this rank has made; None: it is not known.
        stall_s: after this time without a step, rank 0 looks where all ranks are, and again after twice the time; 0:
            never.
        report: receives the message.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        *,
        num_steps: Callable[[], int | None],
        stall_s: float,
        report: Callable[[str], None] = write,
    ):
        self._rank = rank
        self._connections = dict(channel.connections)
        self._names = [rank_name(each, host) for each, host in enumerate(channel.hosts)]
        self._num_steps = num_steps
        self._stall_s = stall_s
        self._report = report
        self._sending = threading.Lock()
        self._ended = threading.Condition()
        self._ends: dict[int, Message] = {}
        self._main_thread = threading.get_ident()
        self._steps: int | None = None
        self._since = self._looked_at = time.monotonic()
        self._due_after_s = stall_s
        self._looks: list[dict[int, _Look]] = []
        self._has_left = False
        self._selector = selectors.EpollSelector()
        for each, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, each)
        threading.Thread(target=self._run, name="hvdtrain-program-watch", daemon=True).start()

    # Called from the main thread.

    def announce_end(self, message: Message) -> None:
        """Tells the connected ranks that this one ends."""
        self._has_left = True
        for connection in list(self._connections.values()):
            self._send(connection, {"kind": "end", **message})

    def first_end(self, timeout_s: float) -> tuple[int, Message] | None:
        """The first rank that has ended, and its message; an empty one if it was lost. None: none has."""
        with self._ended:
            self._ended.wait_for(lambda: bool(self._ends), timeout_s)
            return next(iter(self._ends.items()), None)

    # Called from this thread, from here on.

    def _run(self) -> None:
        interval_s = self._stall_s / _LOOKS_PER_TIMEOUT or None
        while self._connections and not self._has_left:
            for key, _ in self._selector.select(interval_s):
                self._receive(key.data)
            if self._stall_s and not self._has_left:
                self._note_progress()
                if self._rank == 0:
                    self._look_around()

    def _receive(self, rank: int) -> None:
        connection = self._connections[rank]
        for message in connection.receive():
            match message:
                case {"kind": "look"}:
                    self._note_progress()
                    self._send(connection, {"kind": "look taken", "look": self._own_look()})
                case {"kind": "look taken", "look": look}:
                    if self._looks:
                        self._looks[-1][rank] = _Look(*look)
                case {"kind": "end"}:
                    self._note_end(rank, message)
        if connection.is_lost:
            self._selector.unregister(connection)
            del self._connections[rank]
            self._note_end(rank, {})

    def _note_end(self, rank: int, message: Message) -> None:
        with self._ended:
            self._ends.setdefault(rank, message)
            self._ended.notify_all()

    def _note_progress(self) -> None:
        steps = self._num_steps()
        if steps != self._steps:
            self._steps = steps
            self._since = time.monotonic()
            self._due_after_s = self._stall_s
            self._looks = []

    def _own_look(self) -> _Look:
        return _Look(self._steps or 0, time.monotonic() - self._since, stack_of(self._main_thread))

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._steps is None or self._ends or now - self._since < self._due_after_s:
            return
        if self._looks:
            since_look_s = now - self._looked_at
            silent = [name for rank, name in enumerate(self._names) if rank not in self._looks[-1]]
            if since_look_s < self._stall_s * (_MAX_ANSWER_SHARE if silent else 1 / _LOOKS_PER_TIMEOUT):
                return
            if silent or len(self._looks) == _NUM_LOOKS:
                text = f"{some_of(silent)} does not answer." if silent else self._whom_the_others_wait_for()
                if text:
                    self._report(f"hvdtrain: no rank has made a step for {now - self._since:.0f} s; {text}")
                self._looks = []
                self._due_after_s = 2 * (now - self._since)
                return
        self._looked_at = now
        self._looks.append({0: self._own_look()})
        for connection in self._connections.values():
            self._send(connection, {"kind": "look"})

    def _whom_the_others_wait_for(self) -> str | None:
        """The rest of the message; None if ranks still compute, or are all at the same place."""
        detector = StallDetector(0.0)
        places = set()
        for rank, last in sorted(self._looks[-1].items()):
            has_moved = any(each[rank].functions != last.functions for each in self._looks)
            if has_moved or last.standing_s < self._stall_s / 2:
                return None
            places.add(tuple(last.functions))
            detector.add_stack(rank, Position(step=last.num_steps or None), last.stack)
        if len(places) == 1:
            return None
        behind = some_of([self._names[rank] for rank in detector.ranks_behind()])
        waiting = f"the others wait for {behind}" if behind else "ranks are in different places"
        return (
            f"{waiting}. The job goes on; HOROVOD_STALL_CHECK_TIME_SECONDS sets the time.\n"
            f"{detector.report(self._names.__getitem__)}"
        )

    def _send(self, connection: Connection, message: Message) -> None:
        with self._sending:
            connection.send(message)
