"""Run by test_device_prefetch.py: trains with batches on a second device; prints a JSON object.

TensorFlow divides the CPU into two devices, which is possible only before it is used. The second stands for a GPU.
"""

import json

import numpy as np
import tensorflow as tf

PARTS = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], PARTS)

import keras  # noqa: E402
from trainers import make_trainer  # noqa: E402

import hvdtrain  # noqa: E402
from hvdtrain.data import Arrays, RandomAccess  # noqa: E402
from hvdtrain.errors import DataError, UsageError  # noqa: E402
from hvdtrain.system import devices  # noqa: E402

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 255, (70, 5)).astype(np.uint8), RNG.integers(0, 3, 70).astype(np.int32)


class Samples:
    """Some of which cannot be read."""

    def __init__(self, *broken: int):
        self._broken = broken

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int):
        if number in self._broken:
            raise OSError("cannot read")
        return X[number], Y[number]


def trained(source, **options) -> tuple[str, list[str]]:
    """The device of the batches, and the weights."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.layers.Input((5,)), keras.layers.Rescaling(1 / 255), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    )
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=options.get("gradient_accumulation_steps"))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = make_trainer(model, source, batch_size=8, steps=20, **options)
    trainer.fit()
    device = trainer.parts.feed.iterator._iterator_resource.device
    return device[-5:], [weights.tobytes().hex() for weights in model.get_weights()]


SOURCES = {
    "arrays": lambda: (Arrays(X, Y), {}),
    "samples that cannot be read": lambda: (RandomAccess(Samples(3, 40)), {"bad_samples": 2}),
    "several steps in a call": lambda: (Arrays(X, Y), {"steps_per_execution": 3, "gradient_accumulation_steps": 2}),
    "quorum": lambda: (Arrays(X, Y), {"quorum": 1}),
    "balance": lambda: (Arrays(X, Y), {"balance": True, "balance_every": 2}),
}
found = {}
for name, source in SOURCES.items():
    devices.own_gpu = lambda: "/CPU:1"
    data, options = source()
    prefetched = trained(data, prefetch_to_device=True, **options)
    data, options = source()
    plain = trained(data, **options)
    found[name] = {"devices": [prefetched[0], plain[0]], "equal": prefetched[1] == plain[1]}

devices.own_gpu = lambda: None
found["without a GPU"] = trained(Arrays(X, Y), prefetch_to_device=True)[0]
devices.own_gpu = lambda: "/CPU:1"
try:
    trained(RandomAccess(Samples(3, 40)), bad_samples=1, prefetch_to_device=True)
except DataError as error:
    found["too many"] = str(error)
try:
    trained(Arrays(np.array(["a", "b"] * 35), Y), prefetch_to_device=True)
except UsageError as error:
    found["strings"] = str(error)
print(json.dumps(found))
