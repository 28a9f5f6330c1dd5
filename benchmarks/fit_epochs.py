"""Epochs of model.fit on two ranks, with and without tf.data's autotuning.

    launch/run python benchmarks/fit_epochs.py

The input is computed with ``num_parallel_calls=tf.data.AUTOTUNE``. Tuned and untuned epochs take turns in one job; the
time of each is that of the slowest rank. Prints the ratios of neighbours, tuned over untuned: median, middle half and
largest.
"""

import argparse
import statistics
import time
from pathlib import Path

from rank_jobs import measured_on_ranks, tell

SAMPLES, BATCH = 4096, 32


def run(pairs: int, epoch_s: float) -> None:
    """Runs on each rank."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    import tensorflow as tf

    def distort(image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.image.random_contrast(tf.image.random_flip_left_right(image), 0.2, 1.8)
        return tf.image.per_image_standardization(image), tf.reduce_mean(image)

    def data(steps: int, *, is_tuned: bool) -> tf.data.Dataset:
        options = tf.data.Options()
        options.autotune.enabled = is_tuned
        images = np.random.default_rng(0).random((SAMPLES, 32, 32, 3), np.float32)
        distorted = tf.data.Dataset.from_tensor_slices(images).repeat().map(distort, tf.data.AUTOTUNE)
        return distorted.batch(BATCH).take(steps).prefetch(tf.data.AUTOTUNE).with_options(options)

    layers = [keras.Input((32, 32, 3)), keras.layers.Conv2D(16, 5, 2, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")

    def seconds(dataset: tf.data.Dataset) -> float:
        hvdtrain.barrier()
        begin_s = time.perf_counter()
        model.fit(dataset, verbose=0)
        return time.perf_counter() - begin_s

    seconds(data(50, is_tuned=False))
    steps = max(10, round(200 * epoch_s / seconds(data(200, is_tuned=False))))
    steps = int(hvdtrain.average(tf.constant(float(steps))))
    epochs = {is_tuned: data(steps, is_tuned=is_tuned) for is_tuned in (True, False)}
    taken = {is_tuned: [] for is_tuned in epochs}
    for _ in range(pairs):
        for is_tuned, dataset in epochs.items():
            taken[is_tuned].append(seconds(dataset))
    tell({"rank": topology.rank, "tuned": taken[True], "untuned": taken[False]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--epoch-seconds", type=float, default=5.0)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.pairs, arguments.epoch_seconds)
        return
    options = ["--run", "--pairs", str(arguments.pairs), "--epoch-seconds", str(arguments.epoch_seconds)]
    ranks = measured_on_ranks(2, str(Path(__file__)), *options)
    tuned, untuned = (
        [max(times) for times in zip(*(each[name] for each in ranks), strict=True)] for name in ("tuned", "untuned")
    )
    ratios = sorted(a / b for a, b in zip(tuned, untuned, strict=True))
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{arguments.pairs} pairs of epochs of {statistics.median(untuned):.1f} s untuned, on 2 ranks")
    print(f"tuned / untuned: {median:.2f} ({low:.2f} to {high:.2f}), at most {ratios[-1]:.2f}")


if __name__ == "__main__":
    main()
