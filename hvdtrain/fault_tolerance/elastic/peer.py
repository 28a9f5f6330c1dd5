"""What the coordinator knows of a process that has connected to it."""

from hvdtrain.fault_tolerance.channel import Connection
from hvdtrain.fault_tolerance.elastic.membership import Member


class Peer:
    """A connected process; a member once it has said hello."""

    def __init__(self, connection: Connection, now: float):
        self.connection = connection
        self.received_at = now
        self.member: Member | None = None
        self.pid = 0
        self.worker: int | None = None
        """The number of the worker, if the coordinator's process has started it."""
        self.stall_timeout_s = 0.0
        self.heartbeats = 0
        self.step: int | None = None
        self.has_finished = False

    @property
    def name(self) -> str:
        assert self.member is not None
        rank = "a newcomer" if self.member.rank is None else f"rank {self.member.rank}"
        return f"{rank} (host {self.member.host}, process {self.pid})"
