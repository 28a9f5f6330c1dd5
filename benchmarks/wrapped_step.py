"""Overhead of the trainer's compiled step on one rank, compared with Keras' own step, interleaved.

    launch/run python benchmarks/wrapped_step.py

Prints the ratio of step times over pairs of blocks and several models: median and quartiles.
"""

import argparse
import time
from collections.abc import Callable

import hvdtrain

hvdtrain.init(seed=0)

import keras
import numpy as np
from endless_batches import endless_batches
from networks import NETWORKS, compiled
from trainer_steps import step_ms, trainer_steps

STEPS_PER_BLOCK = {"cnn": 20, "mlp": 1000, "lstm": 40, "transformer": 40}


def plain_block(name: str, steps_per_execution: int) -> Callable[[], float]:
    """Keras' own compiled step, as model.fit runs it."""
    model = compiled(NETWORKS[name][0](), keras.optimizers.SGD(1e-3, momentum=0.9))
    model.steps_per_execution = steps_per_execution
    model.make_train_function()
    batches = endless_batches(name, with_factor=False)

    def block() -> float:
        began_s = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK[name] // steps_per_execution):
            model.train_function(batches)
        return 1000 * (time.perf_counter() - began_s) / STEPS_PER_BLOCK[name]

    block()
    return block


def trainer_block(name: str, steps_per_execution: int) -> Callable[[], float]:
    """The step that Trainer runs: distributed optimizer, NaN guard, gradient norm, times."""
    train_step = trainer_steps(name, steps_per_execution)

    def block() -> float:
        return step_ms(train_step, STEPS_PER_BLOCK[name])

    block()
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks per model")
    arguments = parser.parse_args()
    pairs = arguments.models * arguments.pairs
    for name in arguments.networks:
        for steps_per_execution in (1, 10):
            times = []
            for i in range(pairs):
                # New models: two models with the same steps differ persistently by a few percent.
                if i % arguments.pairs == 0:
                    plain, wrapped = plain_block(name, steps_per_execution), trainer_block(name, steps_per_execution)
                # Alternate the order, so that neither always runs second.
                first, second = (plain, wrapped) if i % 2 == 0 else (wrapped, plain)
                a, b = first(), second()
                times.append((a, b) if i % 2 == 0 else (b, a))
            plain_ms, wrapped_ms = np.median(times, axis=0)
            low, ratio, high = np.percentile([b / a for a, b in times], [25, 50, 75])
            print(
                f"{name}, {steps_per_execution} step(s) per call: Keras {plain_ms:.3f} ms, "
                f"hvdtrain {wrapped_ms:.3f} ms, ratio {ratio:.3f} ({low:.3f} to {high:.3f}) over {pairs} pairs",
                flush=True,
            )


if __name__ == "__main__":
    main()
