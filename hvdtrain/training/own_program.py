"""``hvdtrain.init``: starts a rank of a program of one's own; when it ends, or is stuck, the other ranks are told."""

import atexit
import os
import sys
import time
from types import TracebackType

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import GpuConfig
from hvdtrain.distributed.runtime import OnUnequal, Topology
from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.fault_tolerance.channel import Channel, open_channel
from hvdtrain.fault_tolerance.config import JobWatchConfig
from hvdtrain.fault_tolerance.program_watch import ProgramWatch
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.made_steps import counts_steps, num_made_steps
from hvdtrain.system import environment, error_text
from hvdtrain.system.terminal import rank_name, report, write

# A rank that ends sends its message before it leaves Horovod, whose error is what makes the others look for it.
_MESSAGE_S = 3.0
# For the lowest rank to report the end: the launcher then ends the others.
_REPORTING_S = 2.0

_ends: "RankEnds | None" = None


def init(
    *,
    seed: int | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    timeline: str | None = None,
    process_sets: bool = False,
    gpus: GpuConfig | None = None,
    on_unequal: OnUnequal = "stop",
) -> Topology:
    """Starts Horovod, assigns this rank a GPU and a share of the cores, and sets its seeds.

    Call it first, before TensorFlow computes anything. A second call returns the result of the first.

    Args:
        seed: for Keras, NumPy and Python, the same on every rank; None: no seed is set.
        threads: compute threads of this rank; None: a fair share of the host's cores. A step that calls a
            ``tf.function`` from a ``tf.py_function`` needs 2.
        deterministic: make runs bit-identical, at the cost of speed.
        timeline: a file to which rank 0 writes Horovod's timeline of all reductions, for chrome://tracing.
        process_sets: whether :func:`process_set` will be called.
        gpus: how ranks use the GPUs of their hosts (default: each has one for itself).
        on_unequal: what to do if a step of ``model.fit`` is not that of one process: ``stop``, ``warn``, or
            ``ignore``, which does not check it.

    Raises:
        JobError: on every rank: ranks share a GPU, or only some of them have one, and ``gpus`` does not allow it.
        UsageError: the launcher started more ranks than MPI connects, or Keras uses another backend.
    """
    global _ends
    # Under MPI, ranks wait for one that is suspended, or that starts later than the others.
    environment.set_gloo_timeout(JobWatchConfig().stall_timeout)
    topology = runtime.init(
        seed=seed,
        threads=threads,
        deterministic=deterministic,
        timeline=timeline,
        process_sets=process_sets,
        gpus=gpus,
        on_unequal=on_unequal,
    )
    collectives = runtime.current().collectives
    if _ends is None and collectives.size > 1 and not collectives.may_change:
        _ends = RankEnds.connect(collectives)
    return topology


class RankEnds:
    """Replaces Horovod's errors about a rank that has ended by one line that names it and its step."""

    def __init__(self, rank: int, channel: Channel):
        self._rank = rank
        self._hosts = channel.hosts
        self._watch = ProgramWatch(
            rank,
            channel,
            num_steps=lambda: num_made_steps() if counts_steps() else None,
            stall_s=environment.stall_check_s(),
        )
        self._has_announced = False
        self._default_hook = sys.excepthook
        sys.excepthook = self._on_error
        # Before Horovod's, which was registered earlier: its end makes the other ranks' reductions fail.
        atexit.register(self._announce)
        os.register_at_fork(after_in_child=self._become_child)

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
        # HvdtrainErrors say what happened, and may be raised on all ranks.
        if isinstance(error, Exception) and not isinstance(error, HvdtrainError):
            text = error_text.class_and_message(error)
            write(f"hvdtrain: {rank_name(self._rank)} failed after step {num_made_steps()}: {text}")
        self._announce(reported=True)

    def _become_child(self) -> None:
        """A forked child is no rank: its end is not that of its parent."""
        self._has_announced = True
        sys.excepthook = self._default_hook

    def _announce(self, *, reported: bool = False) -> None:
        if self._has_announced:
            return
        self._has_announced = True
        self._watch.announce_end({"step": num_made_steps(), "reported": reported})

    def _reports_end_of_another(self) -> bool:
        """Whether a rank has ended; it is reported then."""
        ended = self._watch.first_end(_MESSAGE_S)
        if ended is None:
            return False
        rank, message = ended
        if message.get("reported"):
            return True
        if self._rank != (1 if rank == 0 else 0):
            time.sleep(_REPORTING_S)
        host = self._hosts[rank]
        how = f"ended after step {message['step']}" if "step" in message else "was lost"
        report(
            self._rank,
            f"all ranks must make the same number of steps. Received: {rank_name(rank, host)} {how}, and this rank "
            "waited for it. Give all ranks the same number of batches (see hvdtrain.shard), and leave the loop on all "
            "of them after the same step.",
        )
        return True
