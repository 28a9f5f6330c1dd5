"""A peer of gpu_steps.py: a process that makes steps when it is asked to, and waits otherwise.

When it is ready to be measured, it prints ``READY`` and its facts as JSON. For each line of its input, a number of
steps, it then makes that many and prints ``TOOK`` and the seconds.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping

Steps = Callable[[int], None]
"""Makes a number of steps and returns when the device has completed them."""


def serve(steps: Steps, facts: Mapping[str, object]) -> None:
    """Prepares, and serves until the input ends."""
    for _ in range(3):  # compiles, and tries algorithms out
        steps(2)
    print("READY " + json.dumps(facts), flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        steps(int(line))
        print(f"TOOK {time.perf_counter() - began_s}", flush=True)
