"""``hvd.DistributedGradientTape`` for Keras 3: a gradient tape that returns gradients reduced over all ranks."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compressed_reduction import make_reducer
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.program_operations import note_own_reduction
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.distributed.step_sums import StepSums
from hvdtrain.errors import UsageError
from hvdtrain.optim.equal_start import require_same_gradients
from hvdtrain.optim.loop_replicas import LoopReplicas
from hvdtrain.optim.made_steps import count_step_of_a_tape
from hvdtrain.optim.own_loops import compares_replicas, note_reduction
from hvdtrain.optim.step_reduction import StepReduction

_replicas: dict[tuple[int, ...], LoopReplicas] = {}
"""By the variables, of which ranks have compared which have gradients."""


class DistributedGradientTape:
    """A ``tf.GradientTape`` whose gradients are averaged over all ranks; apply them with a plain optimizer.

    ``with hvdtrain.DistributedGradientTape() as tape:`` replaces ``with tf.GradientTape() as tape:``; or wrap a tape
    after its block, as with Horovod: ``tape = hvdtrain.DistributedGradientTape(tape)``.

    Args:
        tape: the tape to wrap (default: a new one).
        op: as for :func:`~hvdtrain.DistributedOptimizer`, as are the next three options.
        compression: ``none`` or ``fp16``; without error feedback, because a tape keeps nothing from step to step.
        groups: number of gradient buckets.
        sparse_as_dense: reduce the gradients of embeddings as dense tensors.
        collectives: the collectives to reduce with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option breaks its rule, or, at the first gradient, ranks have gradients of other variables.
    """

    def __init__(
        self,
        tape: tf.GradientTape | None = None,
        *,
        op: str = ReductionConfig.op,
        compression: str = ReductionConfig.compression,
        groups: int | None = ReductionConfig.groups,
        sparse_as_dense: bool = ReductionConfig.sparse_as_dense,
        collectives: Collectives | None = None,
    ):
        if compression not in ("none", "fp16"):
            raise UsageError(
                f"compression of a tape must be none or fp16, which need no state. Received: {compression}. Use "
                "DistributedOptimizer."
            )
        config = ReductionConfig(op=op, groups=groups, sparse_as_dense=sparse_as_dense)  # type: ignore[arg-type]
        self._tape = tf.GradientTape() if tape is None else tape
        collectives = collectives or runtime.current().collectives
        self._collectives = collectives
        self._reduce = StepReduction(
            config=config,
            collectives=collectives,
            reducer=make_reducer(collectives, config, make_compression(compression), keeps_errors=False),
            sums=StepSums(collectives),
        )

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """The reduced gradients, in the structure of ``sources``; None where there is none. All ranks must call it.

        Raises:
            UsageError: a source is not a variable.
        """
        variables = tf.nest.flatten(sources)
        _require_variables(variables)
        gradients = self._tape.gradient(target, sources, output_gradients)
        flat = tf.nest.flatten(gradients)
        found = [i for i, each in enumerate(flat) if each is not None]
        if found:
            note_own_reduction()
        replicas = self._require_same_gradients(found, variables)
        if found:
            num_steps = count_step_of_a_tape()
            if compares_replicas(self._collectives):
                replicas.compare_now_and_then(num_steps, whole_variables(variables))
            reduced = self._reduce([variables[i] for i in found], [flat[i] for i in found]).gradients
            for i, each in zip(found, reduced, strict=True):
                flat[i] = each
        return tf.nest.pack_sequence_as(gradients, flat)

    def _require_same_gradients(self, found: list[int], variables: list[Any]) -> LoopReplicas:
        key = (id(self._collectives), *map(id, variables))
        if key in _replicas:
            return _replicas[key]
        _replicas[key] = LoopReplicas(self._collectives)
        if self._collectives.size > 1:
            note_reduction(self._reduce.config, self._collectives)
            names = [str(getattr(variables[i], "path", variables[i].name)) for i in found]
            require_same_gradients(found, names, self._collectives)
        return _replicas[key]

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


def _require_variables(sources: list[Any]) -> None:
    for each in sources:
        if not isinstance(each, keras.Variable | tf.Variable):
            raise UsageError(
                "the gradients of a DistributedGradientTape must be by variables, which are the same on all ranks. "
                "Received: a tensor. Use tf.GradientTape for gradients by a rank's own samples, and "
                "hvdtrain.average for those by parameters that are tensors."
            )
