"""A hand-written training step, for peers that do not use Keras'."""

from collections.abc import Callable

import keras
import tensorflow as tf
from endless_batches import endless_batches
from networks import NETWORKS

RATE, MOMENTUM = 1e-3, 0.9


def momentum_step(
    name: str, reduce: Callable[[list[tf.Tensor], list[tf.Variable]], list[tf.Tensor]]
) -> Callable[[], None]:
    """Returns a step function: next batch, gradients, reduction, SGD with momentum."""
    model = NETWORKS[name][0]()
    weights = [variable.value for variable in model.trainable_variables]
    velocities = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    batches = endless_batches(name, with_factor=False)

    def step() -> None:
        x, y = batches.get_next()
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(value, weights)]
        for weight, velocity, gradient in zip(weights, velocities, reduce(gradients, weights), strict=True):
            velocity.assign(MOMENTUM * velocity - RATE * gradient)
            weight.assign_add(velocity)

    return step


def block_of(step: Callable[[], None], steps_per_execution: int) -> Callable[[int], None]:
    """Returns a block that makes ``steps_per_execution`` steps in each compiled call."""

    @tf.function
    def call() -> None:
        for _ in tf.range(steps_per_execution):
            step()

    single = tf.function(step)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_execution):
            if steps_per_execution == 1:
                single()
            else:
                call()

    return block
