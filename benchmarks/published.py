"""Predictions of bench for Horovod's published scaling: 512 GPUs, four per host, 25 Gbit/s between hosts.

    launch/run python benchmarks/published.py

Published: 90 % for Inception V3 and ResNet-101, 68 % for VGG-16 (A. Sergeev, M. Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", 2018, batches of 64 on P100). Steps of one P100 are those of TensorFlow's
benchmark page of 2017 (142 and 154 images/s for Inception V3 and VGG-16); ResNet-101 is interpolated between ResNet-50
(219) and ResNet-152 (91.8) by operations. The time at which a gradient is ready follows from the operations of the
layers: the forward pass takes a third of a step. Not published, hence assumed: the fraction of the link's rate that a
ring reaches and the latency of a message, both varied; and no jitter between ranks. All messages use a ring, as in NCCL
at the time.
"""

import math

import keras
import numpy as np
from keras import applications, layers

from hvdtrain.commands.bench.scaling_model import Cluster, Link, MeasuredStep, sync_step

BATCH_SIZE = 64
LINK_BITS = 25e9
WITHIN = Link(1e-5, 80e9)
NETWORKS = {
    "Inception V3": (applications.InceptionV3, 142.0, 0.90),
    "ResNet-101": (applications.ResNet101, None, 0.90),
    "VGG-16": (applications.VGG16, 154.0, 0.68),
}
RESNETS = ((applications.ResNet50, 219.0), (applications.ResNet152, 91.8))


def operations(layer: keras.Layer) -> float:
    """Multiplications and additions of a layer per sample; only matrix products count."""
    if isinstance(layer, layers.Conv2D):
        return 2.0 * math.prod(layer.kernel.shape) * math.prod(layer.output.shape[1:3])
    if isinstance(layer, layers.Dense):
        return 2.0 * math.prod(layer.kernel.shape)
    return 0.0


def gradients(model: keras.Model) -> list[tuple[int, float]]:
    """Bytes of each layer's gradient, and the fraction of a step after which it is ready."""
    total = sum(operations(layer) for layer in model.layers)
    done, found = 0.0, []
    for layer in reversed(model.layers):
        done += operations(layer)
        size = sum(4 * math.prod(weight.shape) for weight in layer.trainable_weights)
        if size:
            found.append((size, 1 / 3 + 2 / 3 * done / total))
    return found


def resnet101_images_per_s(model: keras.Model) -> float:
    """Interpolates between the two published speeds by operations."""
    (few, slow_s), (many, long_s) = (
        (sum(map(operations, make(weights=None).layers)), 1 / speed) for make, speed in RESNETS
    )
    share = (sum(map(operations, model.layers)) - few) / (many - few)
    return 1 / (slow_s + share * (long_s - slow_s))


def main() -> None:
    steps = {}
    for name, (make, speed, _) in NETWORKS.items():
        model = make(weights=None)
        step_s = BATCH_SIZE / (speed or resnet101_images_per_s(model))
        steps[name] = MeasuredStep(np.full(10, step_s), gradients(model))
        print(f"{name}: {steps[name].bytes / 1e6:.0f} MB of gradients, {1000 * step_s:.0f} ms per step on one GPU")
    # The first pair was fixed before any result was known.
    for share, latency_us in ((1.0, 20), (1.0, 5), (1.0, 50), (0.8, 5), (0.8, 20), (0.8, 50)):
        cluster = Cluster(128, 4, Link(latency_us / 1e6, share * LINK_BITS), WITHIN, small_bytes=0)
        print(f"{share:.0%} of 25 Gbit/s, {latency_us} us per message:")
        for name, step in steps.items():
            flat, hierarchical = (100 * sync_step(step, cluster, hierarchical=how).efficiency for how in (False, True))
            published = 100 * NETWORKS[name][2]
            print(f"    {name}: {flat:.1f} % flat ring, {hierarchical:.1f} % hierarchical; published {published:.0f}")


if __name__ == "__main__":
    main()
