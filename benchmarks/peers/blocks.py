"""Timing of blocks of steps, identical for all peers."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

NETWORK = os.environ["NETWORK"]
"""The name of the network to measure."""
_RANKS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
"""What mpirun, horovodrun over Gloo and processes without a launcher have."""
_RANK = int(next((os.environ[name] for name in _RANKS if name in os.environ), "0"))
_TURNS = Path(os.environ["TURNS"])
_BLOCK_S = 0.4
_POLL_S = 0.1
"""Between two looks for this job's turn. Sixteen processes that look every 2 ms take a fifth of two cores."""
UNIT = 10
"""Blocks have a multiple of this number of steps, for cases with as many steps per call."""

Block = Callable[[int], None]
"""Makes a given number of steps and returns when they are complete."""


def pause_between_turns() -> None:
    """Lets the job stop this process between turns; otherwise it would keep a core busy."""
    (_TURNS / f"pid-{os.getpid()}").touch()


def measure(peers: dict[str, dict[str, Block]], barrier: Callable[[], None], maximum: Callable[[int], int]) -> None:
    """Runs a block of each case in every turn of this job.

    After each turn, rank 0 prints the step times in ms by peer and case as JSON; initially, an empty object.

    Args:
        maximum: returns the maximum of a number over all ranks, on every rank.
    """
    blocks = [(peer, case, block) for peer, cases in peers.items() for case, block in cases.items()]
    steps = []
    for _, _, block in blocks:
        block(UNIT)
        barrier()
        began_s = time.perf_counter()
        block(UNIT)
        steps.append(UNIT * maximum(max(1, round(_BLOCK_S / (time.perf_counter() - began_s)))))
    _report({})
    for turn in range(int(os.environ["NUM_TURNS"])):
        while not (_TURNS / f"turn-{turn}").exists():
            time.sleep(_POLL_S)
        found: dict[str, dict[str, float]] = {peer: {} for peer in peers}
        # Rotate the order, and run the first block twice: a process is slow after having been stopped.
        first = turn % len(blocks)
        for i in [first, *range(first, len(blocks)), *range(first)]:
            peer, case, block = blocks[i]
            barrier()
            began_s = time.perf_counter()
            block(steps[i])
            found[peer][case] = 1000 * (time.perf_counter() - began_s) / steps[i]
        _report(found)


def _report(found: dict[str, dict[str, float]]) -> None:
    if _RANK == 0:
        print("RESULT " + json.dumps(found), flush=True)
