"""What a rank knows about the ranks that it is connected to, and how often they send heartbeats."""

from collections.abc import Iterable, Sequence

from hvdtrain.fault_tolerance.channel import Connection, Message, line_of
from hvdtrain.fault_tolerance.stall_detection import Position

# Heartbeats of all ranks together, each way: in larger jobs, each rank sends fewer than one a second.
_MAX_HEARTBEATS_PER_S = 64
_MANY_RANKS = 32
_GATHER_S = 0.2


class Peer:
    """The rank at the other end of a connection.

    Args:
        name: the rank's name in messages.
    """

    def __init__(self, rank: int, name: str, connection: Connection, now: float):
        self.rank = rank
        self.name = name
        self.connection = connection
        self.received_at = now
        self.position = Position()


def heartbeat_interval_s(num_ranks: int, stall_timeout_s: float) -> float:
    """The time between two heartbeats of a rank: at most a fourth of the stall timeout, if there is one."""
    interval_s = max(1.0, num_ranks / _MAX_HEARTBEATS_PER_S)
    return min(interval_s, stall_timeout_s / 4) if stall_timeout_s else interval_s


def gather_time_s(num_peers: int) -> float:
    """How long a rank with this many peers lets messages gather, because each wake-up interrupts its main thread."""
    return _GATHER_S if num_peers > _MANY_RANKS else 0.0


def send_all(peers: Iterable[Peer], message: Message) -> None:
    """Sends a message to all of these ranks."""
    line = line_of(message)
    for peer in peers:
        peer.connection.send_line(line)


def send_heartbeats(peers: Iterable[Peer], position: Position) -> None:
    """Sends this rank's position to those that have received what was sent before."""
    line = line_of({"kind": "heartbeat", "position": position})
    for peer in peers:
        if peer.connection.is_backed_up:
            peer.connection.flush()  # More heartbeats would only queue up.
        else:
            peer.connection.send_line(line)


def loss_of(lost: Sequence[Peer], own_position: Position) -> str:
    """The message about which ranks were lost, and at which step."""
    first, *more = sorted(lost, key=lambda peer: peer.rank)
    # Their last heartbeats may be seconds old; this rank has made about the same progress.
    last = max((own_position, *(peer.position for peer in lost)), key=lambda position: position.heartbeats)
    and_more = f" and {len(more)} more rank{'s' if len(more) > 1 else ''}" if more else ""
    return f"lost connection to {first.name}{and_more} {last.at_step}: killed, or host down."
