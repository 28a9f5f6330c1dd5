"""Averages gradients, losses or parameters: which of these give the updates of one process, in numbers.

    launch/run mpirun -np 2 python benchmarks/three_ways.py

Trains the same network on the same global batches with plain Keras in one process, and then in each way:

* gradients: each rank has a part of the batch and ranks average gradients (``DistributedOptimizer``);
* towers, gradients: in one process, a tower on each of as many logical devices as there are ranks;
* towers, losses: the same towers with one tape over the mean of their losses;
* parameters: each rank makes its own update, and ranks average weights after each (``ParameterAverager``), with slots
  of the optimizer kept by each rank or averaged.

Prints how far the weights are from those of one process after the last step: the largest difference relative to the
largest weight, in double precision. With BatchNormalization, each tower and rank normalizes its own part, so that
none equals one process; ``gradients, sync BN`` normalizes over all. The last results are in
``benchmarks/results/three_ways.json``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import hvdtrain
from hvdtrain.system import environment, tensorflow_start

tensorflow_start.import_tensorflow()

import tensorflow as tf

# Towers are on logical devices, which TensorFlow makes when it starts.
CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * environment.launcher().size)
topology = hvdtrain.init(seed=0)

import keras
import numpy as np
from keras import layers

from hvdtrain import LocalSGDConfig
from hvdtrain.system import versions

GLOBAL_BATCH, FEATURES, CLASSES = 48, 12, 5
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
Batches = list[tuple[np.ndarray, np.ndarray]]


def make_model(batch_norm: str) -> keras.Model:
    """A network of one hidden layer, with equal weights in each call.

    Args:
        batch_norm: "no", "own" (of each part of a batch) or "sync" (over ranks).
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(16, activation="tanh")])
    if batch_norm != "no":
        model.add(layers.BatchNormalization())
    model.add(layers.Dense(CLASSES))
    if batch_norm == "sync":
        hvdtrain.synchronize_batch_normalization(model)
    return model


def parts(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Equal parts of a batch."""
    return np.split(array, count)


def one_process(model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches) -> None:
    for x, y in batches:
        optimizer.apply(gradients_of(model, x, y), model.trainable_variables)


def gradients_of(model: keras.Model, x: np.ndarray, y: np.ndarray) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def average_gradients(model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches) -> None:
    optimizer = hvdtrain.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=LOSS)
    one_process(model, optimizer, own_parts(batches))


def own_parts(batches: Batches) -> Batches:
    return [(parts(x, topology.size)[topology.rank], parts(y, topology.size)[topology.rank]) for x, y in batches]


def tower_gradients(model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches) -> None:
    for x, y in batches:
        of_towers = []
        for i, (each_x, each_y) in enumerate(zip(parts(x, topology.size), parts(y, topology.size), strict=True)):
            with tf.device(f"CPU:{i}"):
                of_towers.append(gradients_of(model, each_x, each_y))
        means = [tf.add_n(each) / topology.size for each in zip(*of_towers, strict=True)]
        optimizer.apply(means, model.trainable_variables)


def tower_losses(model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches) -> None:
    for x, y in batches:
        with tf.GradientTape() as tape:
            losses = []
            for i, (each_x, each_y) in enumerate(zip(parts(x, topology.size), parts(y, topology.size), strict=True)):
                with tf.device(f"CPU:{i}"):
                    losses.append(LOSS(each_y, model(each_x, training=True)))
            loss = tf.add_n(losses) / topology.size
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def parameters(average_slots: str) -> Callable[[keras.Model, keras.optimizers.Optimizer, Batches], None]:
    def average_parameters(model: keras.Model, optimizer: keras.optimizers.Optimizer, batches: Batches) -> None:
        model.compile(optimizer=optimizer, loss=LOSS)
        averager = hvdtrain.ParameterAverager(model, LocalSGDConfig(sync_every=1, average_slots=average_slots))
        for x, y in own_parts(batches):
            optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
            averager.step(samples=len(x))
        averager.finish()

    return average_parameters


WAYS = {
    "gradients": average_gradients,
    "gradients, sync BN": average_gradients,
    "towers, gradients": tower_gradients,
    "towers, losses": tower_losses,
    "parameters, slots kept": parameters("keep"),
    "parameters, slots averaged": parameters("average"),
}


def weights_after(train: Callable, optimizer: str, batch_norm: str, batches: Batches) -> np.ndarray:
    """All trainable weights after a training."""
    model = make_model(batch_norm)
    train(model, OPTIMIZERS[optimizer](), batches)
    return np.concatenate([np.ravel(each) for each in model.trainable_variables])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    keras.config.set_floatx("float64")
    generator = np.random.default_rng(0)
    shape = (steps, GLOBAL_BATCH)
    x, y = generator.normal(size=(*shape, FEATURES)), generator.integers(0, CLASSES, shape)
    batches = list(zip(x, y, strict=True))
    found: dict[str, dict[str, float]] = {}
    for batch_norm in ("no", "own"):
        for optimizer in OPTIMIZERS:
            reference = weights_after(one_process, optimizer, batch_norm, batches)
            name = optimizer + (", BatchNormalization" if batch_norm == "own" else "")
            found[name] = {}
            for way, train in WAYS.items():
                if way.endswith("sync BN") and batch_norm == "no":
                    continue
                kind = "sync" if way.endswith("sync BN") else batch_norm
                weights = weights_after(train, optimizer, kind, batches)
                found[name][way] = float(np.max(np.abs(weights - reference)) / np.max(np.abs(reference)))
                if topology.rank == 0:
                    print(f"{name:<30} {way:<28} {found[name][way]:.1e}", flush=True)
    if topology.rank == 0:
        path = Path(__file__).parent / "results" / "three_ways.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept[f"{topology.size} ranks, {steps} steps"] = found
        path.write_text(json.dumps({**kept, "versions": versions.versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
