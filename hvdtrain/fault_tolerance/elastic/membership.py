"""Who trains in an elastic job: the coordinator's decisions, without sockets, processes and clocks.

A generation trains until one of its members is lost (it is *interrupted*: its reductions cannot complete), or until it
has to *pause*, because a member leaves or a newcomer is ready. Then all living members hold, and the next generation
consists of them and of the newcomers.
"""

import dataclasses
import math

from hvdtrain.errors import UsageError


@dataclasses.dataclass
class Member:
    """A process of the job."""

    number: int
    host: str
    worker: int | None = None
    """Workers are numbered in the order of hosts; None: the coordinator's process has not started it."""
    is_ready: bool = False
    """Whether it can train at once: a newcomer compiles first."""
    rank: int | None = None
    """Its rank in the current generation; None if it is not part of it."""
    holds: bool = False
    """Whether it waits for the next generation."""
    is_leaving: bool = False
    may_wait: bool = False
    """Whether it may stay until another process has taken over, if no other member would be left."""

    @property
    def trains(self) -> bool:
        """Whether it is part of the current generation."""
        return self.rank is not None


class Membership:
    """The members of a job and the phases of its generations.

    Args:
        minimum: fewest members that train.
        maximum: most members that train; others wait.
    """

    def __init__(self, minimum: int, maximum: int):
        if not 1 <= minimum <= maximum:
            raise UsageError(f"MIN:MAX must be two numbers, 1 <= MIN <= MAX. Received: {minimum}:{maximum}")
        self.minimum = minimum
        self.maximum = maximum
        self.generation = 0
        """The number of the current generation; 0 before the first."""
        self.members: dict[int, Member] = {}
        """The living members by number."""
        self.is_interrupted = False
        """Whether a member of the current generation was lost."""
        self._next_number = 0

    def join(self, host: str, worker: int | None = None) -> Member:
        """Adds a process. Before the first generation it is ready at once."""
        member = Member(self._next_number, host, worker, is_ready=self.generation == 0)
        self._next_number += 1
        self.members[member.number] = member
        return member

    def remove(self, number: int) -> bool:
        """Removes a member that was lost; returns whether that interrupts the current generation."""
        member = self.members.pop(number)
        self.is_interrupted = self.is_interrupted or member.trains
        return member.trains

    @property
    def training(self) -> list[Member]:
        """The living members of the current generation, in rank order."""
        ranked = ((member.rank, member) for member in self.members.values() if member.rank is not None)
        return [member for _, member in sorted(ranked, key=lambda each: each[0])]

    @property
    def must_pause(self) -> bool:
        """Whether the current generation has to hold although none of its members is lost."""
        has_room = len(self._staying) < self.maximum or self._all_leave
        return len(self._staying) < len(self.training) or (has_room and bool(self._newcomers))

    @property
    def can_lose_state(self) -> bool:
        """Whether all members leave, and none may wait for another process that takes over."""
        return bool(self.training) and not self._staying and not self._newcomers

    def keep_all(self) -> None:
        """Lets all members that leave stay: the job stops, and they save its state."""
        for member in self.training:
            member.is_leaving = False

    @property
    def _all_leave(self) -> bool:
        return all(member.is_leaving for member in self.training)

    @property
    def _staying(self) -> list[Member]:
        """Members of the current generation that go on; if all leave, those that may wait."""
        return [member for member in self.training if not member.is_leaving or (self._all_leave and member.may_wait)]

    @property
    def _newcomers(self) -> list[Member]:
        """Those that are ready to train: workers in the order of hosts, then processes that others have started."""
        ready = [member for member in self.members.values() if member.is_ready and not member.trains]
        return sorted(ready, key=lambda member: math.inf if member.worker is None else member.worker)

    @property
    def candidates(self) -> list[Member]:
        """The members of the next generation if it were formed now, in rank order.

        If all leave, at least one of them is still part of it, to hand over the state.
        """
        newcomers = self._newcomers
        if not (self.training and self._all_leave and newcomers):
            return [*self._staying, *newcomers][: self.maximum]
        return [*self.training[: max(1, self.maximum - len(newcomers))], *newcomers][: max(2, self.maximum)]

    @property
    def all_hold(self) -> bool:
        """Whether no member of the current generation trains any more."""
        return all(member.holds for member in self.training)

    @property
    def can_form(self) -> bool:
        """Whether the next generation can begin."""
        return self.all_hold and len(self.candidates) >= self.minimum

    def form(self) -> tuple[list[Member], list[Member]]:
        """Begins the next generation.

        Returns:
            Its members in rank order, and those that leave the job.
        """
        chosen = self.candidates
        leaving = [member for member in self.members.values() if member.is_leaving and member not in chosen]
        for member in leaving:
            del self.members[member.number]
        for member in self.members.values():
            member.rank = chosen.index(member) if member in chosen else None
            member.holds = False
        self.generation += 1
        self.is_interrupted = False
        return chosen, leaving
