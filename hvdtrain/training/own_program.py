"""``hvdtrain.init``: starts a rank of a program of one's own, which other ranks are told about when it ends."""

import atexit
import functools
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.runtime import Topology
from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.fault_tolerance.channel import Channel, Message, open_channel, wait_for
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.made_steps import num_made_steps
from hvdtrain.system.terminal import rank_name, report, write

Options = ParamSpec("Options")

# A rank that ends sends its message before it leaves Horovod, whose error is what makes the others look for it.
_MESSAGE_S = 3.0
# For the lowest rank to report the end: the launcher then ends the others.
_REPORTING_S = 2.0

_ends: "RankEnds | None" = None


def _with_named_ends(start: Callable[Options, Topology]) -> Callable[Options, Topology]:
    @functools.wraps(start)
    def start_and_connect(*args: Options.args, **kwargs: Options.kwargs) -> Topology:
        global _ends
        topology = start(*args, **kwargs)
        collectives = runtime.current().collectives
        if _ends is None and collectives.size > 1 and not collectives.may_change:
            _ends = RankEnds.connect(collectives)
        return topology

    return start_and_connect


init = _with_named_ends(runtime.init)


class RankEnds:
    """Replaces Horovod's errors about a rank that has ended by one line that names it and its step.

    Args:
        channel: nothing is sent over it before a rank ends.
    """

    def __init__(self, rank: int, channel: Channel):
        self._rank = rank
        self._channel = channel
        self._has_announced = False
        self._default_hook = sys.excepthook
        sys.excepthook = self._on_error
        # Before Horovod's, which was registered earlier: its end makes the other ranks' reductions fail.
        atexit.register(self._announce)

    @classmethod
    def connect(cls, collectives: Collectives) -> "RankEnds | None":
        """Connects all ranks; None if they cannot be: training does not need it. Collective."""
        try:
            return cls(collectives.rank, open_channel(collectives))
        except JobError:
            return None

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_secondary(error) and self._reports_end_of_another():
            self._announce(reported=True)
            return
        self._default_hook(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, HvdtrainError):
            text = f"{kind.__name__}: {error}".splitlines()[0]
            write(f"hvdtrain: {rank_name(self._rank)} failed after step {num_made_steps()}: {text}")
            self._announce(reported=True)

    def _announce(self, *, reported: bool = False) -> None:
        if self._has_announced:
            return
        self._has_announced = True
        for connection in self._channel.connections.values():
            connection.send({"step": num_made_steps(), "reported": reported})

    def _reports_end_of_another(self) -> bool:
        """Whether a rank has ended; it is reported then."""
        ended = self._first_end()
        if ended is None:
            return False
        rank, message = ended
        if message.get("reported"):
            return True
        if self._rank != (1 if rank == 0 else 0):
            time.sleep(_REPORTING_S)
        host = self._channel.hosts[rank]
        how = f"ended after step {message['step']}" if "step" in message else "was lost"
        report(
            self._rank,
            f"all ranks must make the same number of steps. Received: {rank_name(rank, host)} {how}, and this rank "
            "waited for it. Give all ranks the same number of batches (see hvdtrain.shard), and leave the loop on all "
            "of them after the same step.",
        )
        return True

    def _first_end(self) -> tuple[int, Message] | None:
        """The first rank of which this one hears that it has ended, and its message; an empty one if it was lost."""
        until = time.monotonic() + _MESSAGE_S
        while (left_s := until - time.monotonic()) > 0:
            wait_for(list(self._channel.connections.values()), left_s)
            for rank, connection in self._channel.connections.items():
                messages = connection.receive()
                if messages or connection.is_lost:
                    return rank, messages[0] if messages else {}
        return None
