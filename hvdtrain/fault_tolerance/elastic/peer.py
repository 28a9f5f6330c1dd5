"""What the coordinator knows about a process that has connected to it."""

from hvdtrain.fault_tolerance.channel import Connection
from hvdtrain.fault_tolerance.elastic.hello import Hello
from hvdtrain.fault_tolerance.elastic.membership import Member


class Peer:
    """A connected process; a member once it has said hello."""

    def __init__(self, connection: Connection, now: float):
        self.connection = connection
        self.received_at = now
        self.member: Member | None = None
        self.hello: Hello | None = None
        self.heartbeats = 0
        self.step: int | None = None
        self.has_finished = False
        self.was_member = False
        """Whether it has shown the token; it may be about to start again."""

    @property
    def name(self) -> str:
        assert self.member is not None
        assert self.hello is not None
        rank = "a newcomer" if self.member.rank is None else f"rank {self.member.rank}"
        return f"{rank} (host {self.hello.host}, process {self.hello.pid})"

    @property
    def trains(self) -> bool:
        """Whether it is part of the current generation."""
        return self.member is not None and self.member.trains

    @property
    def stall_timeout_s(self) -> float:
        """How long it may be silent; 0: forever."""
        return 0.0 if self.hello is None else self.hello.stall_timeout_s

    @property
    def worker(self) -> int | None:
        """The number of the worker, if the coordinator's process has started it."""
        return None if self.hello is None else self.hello.worker
