"""Input wait of the CIFAR-size network: TFRecords of 32x32 images, parsed and distorted, on two ranks.

    launch/run python benchmarks/input_wait.py

Writes random images of the real size to a temporary folder, trains on them, and prints for each repetition
the fraction of a step that the slower rank waited for input.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_IMAGES = 8192
NUM_FILES = 4
STEPS = 150


def write_images(folder: Path) -> None:
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    for i in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(folder / f"train-{i}.tfrecord")) as writer:
            for _ in range(NUM_IMAGES // NUM_FILES):
                features = {
                    "image": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[rng.integers(0, 256, 32 * 32 * 3, np.uint8).tobytes()])
                    ),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(rng.integers(10))])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def measure(folder: Path) -> None:
    """Runs on each rank; rank 0 prints the result as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import tensorflow as tf
    from networks import NETWORKS, compiled

    def parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
        parsed = tf.io.parse_example(serialized, features)
        images = tf.reshape(tf.io.decode_raw(parsed["image"], tf.uint8), (-1, 32, 32, 3))
        return tf.cast(images, tf.float32), tf.cast(parsed["label"], tf.int32)

    def distort(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seeds = tf.unstack(tf.random.split(seed, 4))
        image = tf.image.stateless_random_crop(image, (24, 24, 3), seeds[0])
        image = tf.image.stateless_random_flip_left_right(image, seeds[1])
        image = tf.image.stateless_random_brightness(image, 63, seeds[2])
        image = tf.image.stateless_random_contrast(image, 0.2, 1.8, seeds[3])
        return tf.image.per_image_standardization(image), label

    source = hvdtrain.data.TFRecords(
        str(folder / "train-*.tfrecord"), parse, batched=True, augment=distort, cache_dir=folder / "cache"
    )
    make, batch_size = NETWORKS["cnn"]
    model = compiled(make(), keras.optimizers.SGD(1e-3))
    summary = hvdtrain.Trainer(
        model, source, hvdtrain.TrainConfig(batch_size=batch_size, steps=STEPS), reporter=None
    ).fit()
    if topology.rank == 0:
        print(json.dumps({"input_fraction": summary["input_fraction"], "step_ms": summary["step_ms"]["p50"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        measure(arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        shares = []
        for _ in range(arguments.repeats):
            command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, __file__]
            done = subprocess.run([*command, "--folder", folder], stdout=subprocess.PIPE, text=True, check=True)
            result = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
            shares.append(result["input_fraction"])
            print(f"input {result['input_fraction']:.2%} of a step of {result['step_ms']:.1f} ms", flush=True)
        print(f"median {statistics.median(shares):.2%}, from {min(shares):.2%} to {max(shares):.2%}")


if __name__ == "__main__":
    main()
