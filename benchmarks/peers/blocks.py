"""Times blocks of steps: every peer's in the same way."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

NETWORK = os.environ["NETWORK"]
"""The name of the one that is asked for."""
_RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
_TURNS = Path(os.environ["TURNS"])
_BLOCK_S = 0.4
UNIT = 10
"""Blocks have a multiple of so many steps, for cases with as many in a call."""

Block = Callable[[int], None]
"""Makes so many steps, and returns when they are made."""


def stand_still_between_turns() -> None:
    """Has this process stopped while it is not its job's turn, for it would be busy then too."""
    (_TURNS / f"pid-{os.getpid()}").touch()


def measure(peers: dict[str, dict[str, Block]], barrier: Callable[[], None], most: Callable[[int], int]) -> None:
    """Makes a block of each case, again and again, whenever it is this job's turn, until that is the last one.

    Rank 0 prints as JSON what a step takes, in milliseconds, by peer and case: after each turn, and nothing at first.

    Args:
        most: the largest of all ranks' numbers, on every rank.
    """
    blocks = [(peer, case, block) for peer, cases in peers.items() for case, block in cases.items()]
    steps = []
    for _, _, block in blocks:
        block(UNIT)
        barrier()
        began_s = time.perf_counter()
        block(UNIT)
        steps.append(UNIT * most(max(1, round(_BLOCK_S / (time.perf_counter() - began_s)))))
    _tell({})
    for turn in range(int(os.environ["NUM_TURNS"])):
        while not (_TURNS / f"turn-{turn}").exists():
            time.sleep(0.002)
        found: dict[str, dict[str, float]] = {peer: {} for peer in peers}
        # Another first each time, made once more before it: a process that stood still is slow at first.
        first = turn % len(blocks)
        for i in [first, *range(first, len(blocks)), *range(first)]:
            peer, case, block = blocks[i]
            barrier()
            began_s = time.perf_counter()
            block(steps[i])
            found[peer][case] = 1000 * (time.perf_counter() - began_s) / steps[i]
        _tell(found)


def _tell(found: dict[str, dict[str, float]]) -> None:
    if _RANK == 0:
        print("RESULT " + json.dumps(found), flush=True)
