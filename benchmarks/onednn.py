"""Steps of Keras with oneDNN and without it: one process with one thread, interleaved.

    launch/run python benchmarks/onednn.py

On processors with AVX-512 VNNI, TensorFlow uses oneDNN by itself. Prints how many times as long a step takes with it:
median and range over the rounds.
"""

import argparse
import statistics
import time

from rank_jobs import measured_on_ranks, tell

STEPS = {"cnn": 10, "mlp": 500, "lstm": 50, "transformer": 30}
BLOCKS = 3


def measure() -> None:
    """Tells the step time in ms by network."""
    import keras
    import tensorflow as tf
    from endless_batches import endless_batches
    from networks import NETWORKS, compiled

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    step_ms = {}
    for name, num_steps in STEPS.items():
        make, _ = NETWORKS[name]
        model = compiled(make(), keras.optimizers.SGD(0.01, momentum=0.9))
        model.make_train_function()
        iterator = endless_batches(name, with_factor=False)
        blocks = []
        for _ in range(1 + BLOCKS):
            began_s = time.perf_counter()
            for _ in range(num_steps):
                model.train_function(iterator)
            blocks.append(1000 * (time.perf_counter() - began_s) / num_steps)
        step_ms[name] = statistics.median(blocks[1:])
    tell({"rank": 0, **step_ms})


def run(setting: str) -> dict[str, float]:
    (measured,) = measured_on_ranks(1, __file__, "--measure", launcher=["env", f"TF_ENABLE_ONEDNN_OPTS={setting}"])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return
    rounds = [{setting: run(setting) for setting in "01"} for _ in range(arguments.rounds)]
    for name in STEPS:
        ratios = [each["1"][name] / each["0"][name] for each in rounds]
        without = statistics.median(each["0"][name] for each in rounds)
        print(f"{name}: {without:.2f} ms without oneDNN; with it", end=" ")
        print(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as long")


if __name__ == "__main__":
    main()
