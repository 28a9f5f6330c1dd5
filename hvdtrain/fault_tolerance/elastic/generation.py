"""A generation of an elastic job: the processes that train together until one is lost, leaves or joins."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """Which processes train together, in rank order, and where they meet."""

    number: int
    """From 1."""
    members: tuple[int, ...]
    """Numbers of the processes in rank order, the order in which they joined the job."""
    hosts: tuple[str, ...]
    """The host of each member."""
    address: str
    """Where the rendezvous of the generation listens."""
    port: int
    is_last: bool = False
    """Whether it only saves: there are too few members, and no others have come."""

    def place(self, member: int) -> "Place":
        """The place of a member among the ranks."""
        rank = self.members.index(member)
        names = list(dict.fromkeys(self.hosts))
        ranks_of_hosts = [[r for r, host in enumerate(self.hosts) if host == name] for name in names]
        own = ranks_of_hosts[names.index(self.hosts[rank])]
        local_rank = own.index(rank)
        # As Horovod counts: the hosts that have a rank with this local rank number.
        across = [ranks[local_rank] for ranks in ranks_of_hosts if len(ranks) > local_rank]
        return Place(
            rank=rank,
            size=len(self.members),
            local_rank=local_rank,
            local_size=len(own),
            cross_rank=across.index(rank),
            cross_size=len(across),
        )

    def message(self) -> dict[str, Any]:
        """The message for the channel; see :meth:`from_message`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "Generation":
        values = {field.name: message[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**values, "members": tuple(values["members"]), "hosts": tuple(values["hosts"])})


@dataclasses.dataclass(frozen=True)
class Place:
    """What Horovod has to know about a rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
"""The place of a process that has not joined others yet."""
