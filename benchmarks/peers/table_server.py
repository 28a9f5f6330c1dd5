"""One process of TensorFlow's parameter server strategy: a server, a worker, or the chief that trains a table.

Started by ``benchmarks/table_servers.py``. The table and the optimizer's state are divided among the servers; each
worker asks for the distinct rows of its batch. The chief prints the milliseconds of a step: one batch on each worker.
"""

import argparse
import functools
import json
import time

import numpy as np
import tensorflow as tf

WIDTH, IDS_PER_SAMPLE, EXPONENT, LEARNING_RATE = 64, 8, 1.05, 0.01


def samples(rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Zipf-distributed ids, of which frequent ones are anywhere in the table."""
    rng = np.random.default_rng(0)
    order = rng.permutation(rows).astype(np.int32)
    cumulated = np.cumsum(np.arange(1, rows + 1) ** -EXPONENT)
    x = order[np.searchsorted(cumulated, rng.random((count, IDS_PER_SAMPLE)) * cumulated[-1])]
    return x, rng.normal(size=(count, 1)).astype(np.float32)


def serve(cluster: tf.train.ClusterSpec, job: str, task: int) -> None:
    tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc", start=True).join()


def train(cluster: tf.train.ClusterSpec, arguments: argparse.Namespace) -> list[float]:
    """The milliseconds of each of ``--pairs`` steps."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc", task_type="chief", task_id=0
    )
    servers = len(cluster.as_dict()["ps"])
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    workers = len(cluster.as_dict()["worker"])

    def variable(shape: tuple[int, ...], stddev: float) -> tf.Variable:
        initial = functools.partial(tf.random_normal_initializer(stddev=stddev), shape=shape, dtype=tf.float32)
        return tf.Variable(initial_value=initial, trainable=True)

    with strategy.scope():
        table = variable((arguments.rows, WIDTH), 0.05)
        state = tf.Variable(
            functools.partial(tf.constant_initializer(0.1), shape=(arguments.rows, WIDTH), dtype=tf.float32)
        )
        dense = [variable(shape, 0.1) for shape in ((WIDTH, 64), (64, 1))]
        dense_state = [variable(shape, 0.0) for shape in ((WIDTH, 64), (64, 1))]
    shards, states = table.variables, state.variables
    adagrad = arguments.optimizer == "adagrad"

    def update_rows(shard: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices) -> None:
        if adagrad:
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=shard.handle,
                accum=slot.handle,
                lr=LEARNING_RATE,
                epsilon=1e-7,
                grad=gradient.values,
                indices=gradient.indices,
            )
        else:
            tf.raw_ops.ResourceScatterSub(
                resource=shard.handle, indices=gradient.indices, updates=LEARNING_RATE * gradient.values
            )

    def update(weights: tf.Variable, slot: tf.Variable, gradient: tf.Tensor) -> None:
        if adagrad:
            tf.raw_ops.ResourceApplyAdagradV2(
                var=weights.handle, accum=slot.handle, lr=LEARNING_RATE, epsilon=1e-7, grad=gradient
            )
        else:
            tf.raw_ops.ResourceApplyGradientDescent(var=weights.handle, alpha=LEARNING_RATE, delta=gradient)

    @tf.function
    def step(iterator):  # type: ignore[no-untyped-def]
        ids, y = next(iterator)
        distinct, positions = tf.unique(tf.reshape(ids, [-1]))
        with tf.GradientTape() as tape:
            rows = tf.gather(tf.nn.embedding_lookup(table, distinct), tf.reshape(positions, tf.shape(ids)))
            hidden = tf.nn.relu(tf.reduce_mean(rows, 1) @ dense[0])
            loss = tf.reduce_mean(tf.square(hidden @ dense[1] - y))
        gradients = tape.gradient(loss, [*shards, *dense])
        for shard, slot, gradient in zip(shards, states, gradients[: len(shards)], strict=True):
            update_rows(shard, slot, gradient)
        for weights, slot, gradient in zip(dense, dense_state, gradients[len(shards) :], strict=True):
            update(weights, slot, gradient)
        return loss

    def data() -> tf.data.Dataset:
        x, y = samples(arguments.rows, 8 * arguments.batch_size)
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(arguments.batch_size)

    iterator = iter(coordinator.create_per_worker_dataset(data))
    times = []
    for _ in range(arguments.pairs + 3):
        began_s = time.perf_counter()
        # Asynchronous in between: eight batches for each worker.
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(8 * workers)]
        coordinator.join()
        times.append(1000 * (time.perf_counter() - began_s) / 8)
    assert all(np.isfinite(each.fetch()) for each in losses)
    return times[3:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=["chief", "worker", "ps"])
    parser.add_argument("task", type=int)
    parser.add_argument("cluster", help="the addresses by job, as JSON")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    cluster = tf.train.ClusterSpec(json.loads(arguments.cluster))
    if arguments.job == "chief":
        print("MEASURED " + json.dumps(train(cluster, arguments)), flush=True)
    else:
        serve(cluster, arguments.job, arguments.task)


if __name__ == "__main__":
    main()
