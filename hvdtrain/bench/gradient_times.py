"""When in a step each gradient is ready to be reduced."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.bench.cases import make_trainer
from hvdtrain.collectives import Gradient, GradientReducer, OneProcess
from hvdtrain.config import BenchConfig
from hvdtrain.failure import JobWatch
from hvdtrain.optimizer import reduce_among
from hvdtrain.tasks import Data, Task
from hvdtrain.timing.clock import Clock

_STEPS = 20


class _Noting(OneProcess):
    """Reduces nothing, and notes when it could."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.ready: tf.Variable | None = None
        """Seconds since 1970, of each gradient in the last step."""

    def gradient_reducer(
        self, *, name: str, op: str, compression: str, groups: int | None, sparse_as_dense: bool
    ) -> GradientReducer:
        halves = 2 if compression == "fp16" else 1

        def reduce(gradients: Sequence[Gradient]) -> list[Gradient]:
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            self.bytes = [each.dtype.size * each.shape.num_elements() // halves for each in dense]
            if self.ready is None:
                with tf.init_scope(), tf.device("CPU"):
                    self.ready = tf.Variable(tf.zeros([len(dense)], tf.float64), trainable=False)
            now = []
            with tf.device("CPU"):
                for each in dense:
                    with tf.control_dependencies([each]):
                        now.append(tf.timestamp())
                self.ready.assign(tf.stack(now))
            return list(gradients)

        return reduce


def measure(config: BenchConfig, task: Task, data: Data, watch: JobWatch) -> list[tuple[int, float]]:
    """Of each gradient its bytes, and after what share of a step without communication it is ready (the median)."""
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
        shares.append([(ready_s - began_s) / took_s for ready_s in noting.ready.numpy()])
    return list(zip(noting.bytes, map(statistics.median, zip(*shares, strict=True)), strict=True))
