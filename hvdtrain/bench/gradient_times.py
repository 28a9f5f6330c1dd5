"""When in a step each message of gradients is ready to be reduced."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.bench.cases import make_trainer
from hvdtrain.collectives import Gradient, GradientReducer, OneProcess, Reduced, unreduced
from hvdtrain.config import BenchConfig
from hvdtrain.failure import JobWatch
from hvdtrain.messages import packing_of
from hvdtrain.optimizer import reduce_among
from hvdtrain.tasks import Data, Task
from hvdtrain.timing.clock import Clock

_STEPS = 20


def _now_s(_: np.ndarray) -> np.float64:
    return np.float64(time.time())


class _Noting(OneProcess):
    """Reduces nothing, and notes when it could."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        """Of each gradient."""
        self.messages: Sequence[Sequence[int]] = []
        """The gradients that would travel together."""
        self.ready: tf.Variable | None = None
        """Seconds since 1970, of each gradient in the last step."""

    def gradient_reducer(
        self, *, name: str, op: str, compression: str, groups: int | None, sparse_as_dense: bool
    ) -> GradientReducer:
        halves = 2 if compression == "fp16" else 1

        def reduce(gradients: Sequence[Gradient]) -> Reduced:
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            self.bytes = [each.dtype.size * each.shape.num_elements() // halves for each in dense]
            self.messages = packing_of(dense, len(dense) if op == "adasum" else groups).members
            if self.ready is None:
                with tf.init_scope(), tf.device("CPU"):
                    self.ready = tf.Variable(tf.zeros([len(dense)], tf.float64), trainable=False)
            with tf.device("CPU"):
                # tf.timestamp would not do: TensorFlow makes stateful operations wait for each other, in the order in
                # which they stand, and the first gradient is the last to be there.
                firsts = [tf.reshape(each, [-1])[:1] for each in dense]
                now = [tf.numpy_function(_now_s, [first], tf.float64, stateful=False) for first in firsts]
                self.ready.assign(tf.reshape(tf.stack(now), [len(dense)]))
            return unreduced(gradients)

        return reduce


def measure(config: BenchConfig, task: Task, data: Data, watch: JobWatch) -> list[tuple[int, float]]:
    """Of each message its bytes, and after what share of a step without communication it is ready (the median)."""
    noting = _Noting()
    with runtime.by_itself():
        trainer = make_trainer(dataclasses.replace(config, steps_per_call=1), task, data, watch)
        reduce_among(trainer.model.optimizer, noting)
    trainer.make_steps(1, Clock())  # compiles
    shares = []
    for _ in range(_STEPS):
        began_s = time.time()
        trainer.make_steps(1, Clock())
        took_s = time.time() - began_s
        assert noting.ready is not None
        ready_s = noting.ready.numpy()
        shares.append([(max(ready_s[i] for i in message) - began_s) / took_s for message in noting.messages])
    sizes = [sum(noting.bytes[i] for i in message) for message in noting.messages]
    return list(zip(sizes, map(statistics.median, zip(*shares, strict=True)), strict=True))
