"""Times blocks of steps: every peer's in the same way."""

import json
import os
import statistics
import time
from collections.abc import Callable

NETWORKS = os.environ["NETWORKS"].split()
"""The names of those that are asked for."""
_BLOCKS = 4
_BLOCK_S = 0.4
UNIT = 10
"""Blocks have a multiple of so many steps, for cases with as many in a call."""

Block = Callable[[int], None]
"""Makes so many steps, and returns when they are made."""


def measure(peers: dict[str, dict[str, Block]], barrier: Callable[[], None], most: Callable[[int], int]) -> None:
    """Prints as JSON what a step takes, in milliseconds, by peer and case: the median of blocks, made in turn.

    Args:
        most: the largest of all ranks' numbers, on every rank.
    """
    # Of one network all peers' one after the other.
    blocks = [
        (peer, case, block)
        for name in NETWORKS
        for peer, cases in peers.items()
        for case, block in cases.items()
        if case.startswith(f"{name},")
    ]
    steps = []
    for _, _, block in blocks:
        block(UNIT)
        barrier()
        began_s = time.perf_counter()
        block(UNIT)
        steps.append(UNIT * most(max(1, round(_BLOCK_S / (time.perf_counter() - began_s)))))
    times: list[list[float]] = [[] for _ in blocks]
    for _ in range(_BLOCKS):
        for i, (_, _, block) in enumerate(blocks):
            barrier()
            began_s = time.perf_counter()
            block(steps[i])
            times[i].append(1000 * (time.perf_counter() - began_s) / steps[i])
    found: dict[str, dict[str, float]] = {peer: {} for peer in peers}
    for (peer, case, _), each in zip(blocks, times, strict=True):
        found[peer][case] = statistics.median(each)
    print("RESULT " + json.dumps(found), flush=True)
