"""What the distributed optimizer costs on one rank: Keras' own compiled step with it and without, in turn.

    launch/run python benchmarks/wrapped_step.py

Prints the ratio of the two for each pair of blocks: median, and the range of the middle half.
"""

import argparse

import hvdtrain

hvdtrain.init(seed=0)

import keras
import numpy as np
from networks import NETWORKS, compiled, endless_batches, step_ms

from hvdtrain.steps import CompiledSteps

STEPS_PER_BLOCK = {"cnn": 20, "mlp": 1000}


def make_block(name: str, distributed: bool, steps_per_call: int):
    make, batch_size = NETWORKS[name]
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model = compiled(make(), hvdtrain.DistributedOptimizer(optimizer) if distributed else optimizer)
    steps = CompiledSteps(model, steps_per_call=steps_per_call, accumulate=1)
    batches = endless_batches(model, batch_size)

    def block() -> float:
        return step_ms(steps, batches, STEPS_PER_BLOCK[name])

    block()
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    for name in NETWORKS:
        for steps_per_call in (1, 10):
            plain, wrapped = (make_block(name, distributed, steps_per_call) for distributed in (False, True))
            times = []
            for i in range(pairs):
                # Which goes first alternates, so that neither always follows the other.
                first, second = (plain, wrapped) if i % 2 == 0 else (wrapped, plain)
                a, b = first(), second()
                times.append((a, b) if i % 2 == 0 else (b, a))
            plain_ms, wrapped_ms = np.median(times, axis=0)
            low, ratio, high = np.percentile([b / a for a, b in times], [25, 50, 75])
            print(
                f"{name}, {steps_per_call} step(s) a call: plain {plain_ms:.3f} ms, distributed {wrapped_ms:.3f} ms, "
                f"ratio {ratio:.3f} ({low:.3f} to {high:.3f}) over {pairs} pairs",
                flush=True,
            )


if __name__ == "__main__":
    main()
