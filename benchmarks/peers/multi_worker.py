"""tf.distribute.MultiWorkerMirroredStrategy with a custom loop: Keras 3's model.fit does not support it."""

import os

import tensorflow as tf

threads = int(os.environ["THREADS"])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

from blocks import NETWORK, measure
from gradient_tape import momentum_step


def average(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    def reduce(strategy, *gradients):
        pairs = zip(gradients, weights, strict=True)
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.MEAN, list(pairs))

    return tf.distribute.get_replica_context().merge_call(reduce, args=tuple(gradients))


def block_of(steps_per_execution: int):
    with strategy.scope():
        step = momentum_step(NETWORK, average)

    @tf.function
    def one() -> None:
        strategy.run(step)

    @tf.function
    def several() -> None:
        for _ in tf.range(steps_per_execution):
            strategy.run(step)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_execution):
            if steps_per_execution == 1:
                one()
            else:
                several()

    return block


@tf.function
def sum_of(value: tf.Tensor) -> tf.Tensor:
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(value,)), axis=None)


def barrier() -> None:
    sum_of(tf.zeros(1)).numpy()


def maximum(value: int) -> int:
    # There is no maximum reduction; the mean is also equal on all workers.
    return round(float(sum_of(tf.constant(float(value))).numpy()) / strategy.num_replicas_in_sync)


blocks = {f"{k} a call": block_of(k) for k in (1, 10)}
measure({"MultiWorkerMirrored": blocks}, barrier, maximum)
