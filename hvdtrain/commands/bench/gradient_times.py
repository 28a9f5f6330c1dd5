"""When in a step each gradient bucket is ready to be reduced."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.commands.bench.cases import make_runner
from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.session import Session
from hvdtrain.data import Data
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import bucket_layout
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer, ReducedGradients, unreduced
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.tasks.task import Task
from hvdtrain.training.clock import Clock

_STEPS = 20


def _now_s(_: np.ndarray) -> np.float64:
    return np.float64(time.time())


class _TimingCollectives(SingleProcessCollectives):
    """Reduces nothing; records when each gradient could be reduced."""

    def __init__(self, compression: Compression | None) -> None:
        super().__init__()
        self._compression = compression
        self.bytes: list[int] = []
        """The size of each gradient."""
        self.buckets: Sequence[Sequence[int]] = []
        """The gradients that would share a bucket."""
        self.ready: tf.Variable | None = None
        """When each gradient of the last step was ready, in seconds since 1970."""

    def _sent_bytes(self, gradient: tf.TensorSpec) -> int:
        compressed = None if self._compression is None else self._compression.num_bytes(gradient)
        return gradient.dtype.size * gradient.shape.num_elements() if compressed is None else compressed

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            self.bytes = [self._sent_bytes(tf.TensorSpec(each.shape, each.dtype)) for each in dense]
            self.buckets = bucket_layout(dense, config.groups if config.is_linear else len(dense)).members
            if self.ready is None:
                with outside_of_step(), tf.device("CPU"):
                    self.ready = tf.Variable(tf.zeros([len(dense)], tf.float64), trainable=False)
            with tf.device("CPU"):
                # Not tf.timestamp: TensorFlow runs stateful operations in the order of the program, and the first
                # gradient is the last to be ready.
                firsts = [tf.reshape(each, [-1])[:1] for each in dense]
                now = [tf.numpy_function(_now_s, [first], tf.float64, stateful=False) for first in firsts]
                self.ready.assign(tf.reshape(tf.stack(now), [len(dense)]))
            return unreduced(gradients)

        return reduce


def measure(config: BenchConfig, task: Task, data: Data, session: Session) -> list[tuple[int, float]]:
    """For each bucket, its bytes and the fraction of a step without communication after which it is ready (median)."""
    collectives = _TimingCollectives(make_compression(config.reduction.compression))
    single_steps = dataclasses.replace(config, training=dataclasses.replace(config.training, steps_per_execution=1))
    runner = make_runner(single_steps, task, data, session, collectives, mode="sync")
    runner.run_steps(1, Clock())  # compiles
    fractions = []
    for _ in range(_STEPS):
        start_s = time.time()
        runner.run_steps(1, Clock())
        step_s = time.time() - start_s
        assert collectives.ready is not None
        ready_s = collectives.ready.numpy()
        fractions.append([(max(ready_s[i] for i in bucket) - start_s) / step_s for bucket in collectives.buckets])
    sizes = [sum(collectives.bytes[i] for i in bucket) for bucket in collectives.buckets]
    return list(zip(sizes, map(statistics.median, zip(*fractions, strict=True)), strict=True))
