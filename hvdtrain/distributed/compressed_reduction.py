"""The reduction of gradients that are compressed, with error feedback."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compression import Compressed, Compression, Ranks
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    GradientReducer,
    ReducedGradients,
    StepSum,
    is_sparse,
)

_STEPS = "steps"


def make_reducer(
    collectives: Collectives,
    config: ReductionConfig,
    compression: Compression | None,
    *,
    keeps_errors: bool = True,
    memory: CompressionMemory | None = None,
) -> GradientReducer:
    """The reduction of an optimizer's gradients.

    Args:
        keeps_errors: whether compression errors are added to the next step's gradients.
        memory: the memory of another reduction of the same gradients, which this one continues.
    """
    if compression is None:
        return collectives.gradient_reducer(config)
    memory = memory or CompressionMemory(collectives.size, sums=config.op == "sum")
    return CompressedReducer(collectives, config, compression, memory, keeps_errors=keeps_errors)


class CompressedReducer:
    """Reduces dense gradients by a compression, and sends the others uncompressed.

    A single rank compresses nothing. If it resumes a run of several ranks, their errors are part of its first step.
    """

    def __init__(
        self,
        collectives: Collectives,
        config: ReductionConfig,
        compression: Compression,
        memory: CompressionMemory,
        *,
        keeps_errors: bool,
    ):
        self._collectives = collectives
        self._config = config
        self._compression = compression
        self._keeps_errors = keeps_errors
        self.memory = memory
        self._reduce_whole = collectives.gradient_reducer(dataclasses.replace(config, groups=None))
        self._sums: list[StepSum] = []
        """The sums of a step, in order: when the step is traced again, it must use the same names."""
        self._sum_before_start = collectives.step_sum(config.groups)

    def __call__(self, gradients: Sequence[Gradient]) -> ReducedGradients:
        if not self._collectives.reduces and self.memory.is_empty:
            return self._reduce_whole(gradients)
        if self._config.sparse_as_dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        chosen = [i for i, each in enumerate(gradients) if self._is_compressed(each)]
        others = [i for i in range(len(gradients)) if i not in chosen]
        whole = self._reduce_whole([gradients[i] for i in others]) if others else ReducedGradients([], [], list)
        if not chosen:
            return whole
        sent, means, lost = self._reduce([gradients[i] for i in chosen], whole.buckets)

        def unpack(buckets: Sequence[tf.Tensor]) -> list[Gradient]:
            found: dict[int, Gradient] = dict(zip(others, whole.unpack(buckets[: -len(chosen)]), strict=True))
            found |= dict(zip(chosen, buckets[-len(chosen) :], strict=True))
            return [found[i] for i in range(len(gradients))]

        return ReducedGradients([*whole.sent, *sent], [*whole.buckets, *means], unpack, lost)

    def _is_compressed(self, gradient: Gradient) -> bool:
        return (
            not is_sparse(gradient)
            and gradient.shape.is_fully_defined()
            and self._compression.num_bytes(tf.TensorSpec(gradient.shape, gradient.dtype)) is not None
        )

    def _reduce(
        self, gradients: Sequence[tf.Tensor], whole: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Returns this rank's gradients plus the previous errors, the gradients of all ranks, and the new errors.

        Args:
            whole: the buckets that are reduced without compression in the same step.
        """
        specs, compression, memory = (
            [tf.TensorSpec(each.shape, each.dtype) for each in gradients],
            self._compression,
            self.memory,
        )
        initial = compression.initial_state(specs)
        if compression.start_after:
            initial = {**initial, _STEPS: np.zeros((), np.int64)}
        memory.require(specs if self._keeps_errors else [], initial)
        errors = [error.value.read_value() for error in memory.errors]
        sent = [each + error for each, error in zip(gradients, errors, strict=True)] if errors else list(gradients)
        compressed = self._from_start(sent)
        means = list(compressed.means)
        # The same expression as in the gradient checks, so that TensorFlow computes it once.
        finite = tf.reduce_all(
            tf.math.is_finite([tf.cast(tf.nn.l2_loss(each), tf.float32) for each in (*whole, *means)])
        )
        lost = [each - own for each, own in zip(sent, compressed.own, strict=True)]

        def keep() -> None:
            for error, value in zip(memory.errors, lost, strict=False):
                error.assign(value)
            for name, value in compressed.state.items():
                memory.shared[name].assign(value)

        tf.cond(finite, keep, lambda: None)
        if self._config.op == "sum":
            means = [each * tf.cast(self._collectives.num_ranks(), each.dtype) for each in means]
        return sent, means, lost

    def _from_start(self, gradients: Sequence[tf.Tensor]) -> Compressed:
        """Sends gradients uncompressed until ``start_after``, then compresses."""
        state = {name: variable.value.read_value() for name, variable in self.memory.shared.items()}
        if not self._collectives.reduces:
            return Compressed(list(gradients), list(gradients), state)
        steps = state.pop(_STEPS, None)
        if steps is None:
            return self._compress(gradients, state)

        def send_whole() -> Compressed:
            means = Ranks(self._collectives.num_ranks(), self._sum_before_start).mean(gradients)
            return Compressed(means, list(gradients), state)

        found = tf.cond(steps < self._compression.start_after, send_whole, lambda: self._compress(gradients, state))
        return found._replace(state={**found.state, _STEPS: steps + 1})

    def _compress(self, gradients: Sequence[tf.Tensor], state: dict[str, tf.Tensor]) -> Compressed:
        num_sums = 0

        def sum_over_ranks(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal num_sums
            if num_sums == len(self._sums):
                self._sums.append(self._collectives.step_sum(self._config.groups))
            num_sums += 1
            return self._sums[num_sums - 1](tensors)

        return self._compression.reduce(gradients, state, Ranks(self._collectives.num_ranks(), sum_over_ranks))
