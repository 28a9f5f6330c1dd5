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


def measure(blocks: dict[str, Callable[[int], None]], barrier: Callable[[], None], most: Callable[[int], int]) -> None:
    """Prints as JSON what a step takes, in milliseconds: the median of blocks, made in turn.

    Args:
        blocks: a function for each case that makes so many steps, and returns when they are made.
        most: the largest of all ranks' numbers, on every rank.
    """
    steps = {}
    for name, block in blocks.items():
        block(UNIT)
        barrier()
        began_s = time.perf_counter()
        block(UNIT)
        steps[name] = UNIT * most(max(1, round(_BLOCK_S / (time.perf_counter() - began_s))))
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(_BLOCKS):
        for name, block in blocks.items():
            barrier()
            began_s = time.perf_counter()
            block(steps[name])
            times[name].append(1000 * (time.perf_counter() - began_s) / steps[name])
    print("RESULT " + json.dumps({name: statistics.median(each) for name, each in times.items()}), flush=True)
