"""A step of a user's program, made by all ranks and by one process, each from the same state."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.alone import alone
from hvdtrain.distributed.batch_norm import moments_over_ranks
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer
from hvdtrain.distributed.optimizers import leaves_of, optimizer_variables
from hvdtrain.distributed.replica_consistency import differing
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.snapshot import host_array
from hvdtrain.optim.epoch_steps import EpochSteps
from hvdtrain.optim.global_loss import gradient_weight_of_step
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.optim.pipeline import GradientPipeline, NoCheck, pipelines_of, replaced_pipelines
from hvdtrain.optim.step_reduction import StepReduction
from hvdtrain.seams import keras_internals
from hvdtrain.training.equality.updates import ChooseGradients, Update
from hvdtrain.training.equality.written_variables import WrittenVariables
from hvdtrain.training.metrics import results_of, sums


@dataclasses.dataclass(frozen=True)
class Change:
    """What a step has made of a variable."""

    before: np.ndarray
    after: np.ndarray


@dataclasses.dataclass
class Outcome:
    """What a step has done."""

    updates: list[Update] = dataclasses.field(default_factory=list)
    changes: dict[str, Change] = dataclasses.field(default_factory=dict)
    """By the path of the variable: those of the model and its optimizers, without metrics."""
    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Metrics over all samples."""
    returned: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Other numbers that the step returns: their means over ranks."""


Draw = Callable[[WrittenVariables], contextlib.AbstractContextManager[None]]


class CheckedStep:
    """A step that can be made in two ways, and leaves no trace.

    Args:
        step: a ``train_step``: receives the samples, updates variables, and may return values by name.
        model: what it trains.
        collectives: the ranks that make steps together.
    """

    def __init__(self, step: Callable[[Any], Any], model: keras.Model, collectives: Collectives):
        self._step = step
        self._model = model
        self._collectives = collectives
        self._reducers: dict[int, GradientReducer] = {}

    def of_one_process(self, batch: Any, draw: Draw, choose: ChooseGradients, perturb: int = 0) -> Outcome:
        """Makes the step as one process does.

        Args:
            batch: the whole batch.
            choose: as for :data:`~hvdtrain.training.equality.updates.ChooseGradients`.
            perturb: by how many units in the last place weights are changed before, at random, to measure rounding.
        """
        one = SingleProcessCollectives()

        def reduction(leaf: Any, own: StepReduction) -> StepReduction:
            config = _exact(own.config)
            return StepReduction(config=config, collectives=one, reducer=one.gradient_reducer(config), sums=own.sums)

        with alone():
            return self._make(batch, draw, choose, one, reduction, perturb)

    def of_all_ranks(self, batch: Any, draw: Draw, choose: ChooseGradients) -> Outcome:
        """Makes the step together with the other ranks, which must all call it.

        Args:
            batch: this rank's samples.
            choose: as for :meth:`of_one_process`.
        """
        ranks = self._collectives

        def reduction(leaf: Any, own: StepReduction) -> StepReduction:
            config = _exact(own.config)
            if id(leaf) not in self._reducers:
                self._reducers[id(leaf)] = ranks.gradient_reducer(config)
            reducer = self._reducers[id(leaf)]
            return StepReduction(
                config=config,
                collectives=ranks,
                reducer=reducer,
                local_variables=own.local_variables,
                sums=own.sums,
            )

        return self._make(batch, draw, choose, ranks, reduction, 0)

    @property
    def epsilon(self) -> float:
        """The rounding of one operation, of the coarsest dtype that the model computes in."""
        layers = keras_internals.FLATTEN_LAYERS.of(self._model)()
        found = {layer.compute_dtype for layer in layers} | {v.dtype for v in self._model.trainable_variables}
        return max(
            (_epsilon(each) for each in found if keras.backend.is_float_dtype(each)), default=_epsilon("float32")
        )

    def _make(
        self,
        batch: Any,
        draw: Draw,
        choose: ChooseGradients,
        ranks: Collectives,
        reduction: Callable[[Any, StepReduction], StepReduction],
        perturb: int,
    ) -> Outcome:
        written, outcome = WrittenVariables(), Outcome()

        def apply(leaf: Any, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]) -> Sequence[Gradient]:
            update = Update(list(variables), list(gradients))
            outcome.updates.append(update)
            chosen = choose(leaf, update)
            for variable in (*variables, *leaf.variables):
                written.note(variable.value)
            return chosen

        def replacement(leaf: Any, own: GradientPipeline) -> GradientPipeline:
            is_sharded = own.reduce.sharded is not None

            def update(gradients: Sequence[Gradient], variables: Sequence[keras.Variable], rate: Any) -> None:
                chosen = apply(leaf, gradients, variables)
                if not is_sharded:
                    own.update(chosen, variables, rate)

            replaced = dataclasses.replace(
                own,
                weigh=lambda loss: loss,
                mark=lambda gradients, was_weighed: gradients,
                divert=None,
                start=None,
                reduce=reduction(leaf, own.reduce),
                check=NoCheck(),
                update=update,
                steps=EpochSteps(ranks),
            )
            if is_sharded:  # Each rank has a part of the state: the gradients are compared.
                clip = getattr(keras.optimizers.Optimizer, keras_internals.CLIP.name)
                return dataclasses.replace(
                    replaced,
                    clip=lambda gradients, variables: clip(leaf, gradients),
                    decay=lambda variables: None,
                    average=lambda variables: None,
                )
            return replaced

        try:
            with (
                written.noted(),
                draw(written),
                _eager_functions(),
                replaced_pipelines(replacement),
                _plain_updates(apply),
                self._batch_normalization(ranks),
            ):
                if perturb:
                    self._perturb_weights(perturb)
                self._model.reset_metrics()
                returned: Any = None
                for _ in range(self._steps_per_update):
                    returned = self._step(batch)
                outcome.values = self._metrics(ranks)
                outcome.returned = _means(returned if isinstance(returned, Mapping) else {}, outcome.values, ranks)
            outcome.changes = self._changes(written, ranks)
        finally:
            written.restore()
        return outcome

    @property
    def _steps_per_update(self) -> int:
        return max((leaf.gradient_accumulation_steps or 1 for leaf in leaves_of(self._model)), default=1)

    def _perturb_weights(self, units: int) -> None:
        generator = np.random.RandomState(units)
        for variable in self._model.trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                own = variable.numpy()
                noise = 1 + units * _epsilon(variable.dtype) * generator.choice([-1.0, 1.0], own.shape)
                variable.assign((own.astype(np.float64) * noise).astype(own.dtype))

    def _metrics(self, ranks: Collectives) -> dict[str, np.ndarray]:
        own = ranks.sum(sums(self._model))
        try:
            values = results_of(self._model, own)
        except ValueError:  # A train_step of one's own leaves metrics of compile() unbuilt.
            return {}
        if any(pipeline.reduce.config.op == "sum" for _, pipeline in pipelines_of(self._model)):
            values.pop("loss", None)  # On each rank, it is that of its samples.
        return {name: np.asarray(each) for name, each in values.items()}

    def _changes(self, written: WrittenVariables, ranks: Collectives) -> dict[str, Change]:
        found = {id(each.variable): each for each in written.found}
        statistics = [v for v in whole_variables(self._model.non_trainable_weights) if id(v.value) in found]
        replicated = [*self._model.trainable_weights, *optimizer_variables(self._model)]
        changes = {
            f"{i} {v.path}": Change(_number(found[id(v.value)].before), _number(host_array(v)))
            for i, v in enumerate(replicated)
            if id(v.value) in found
        }
        split = differing(statistics, ranks)
        for i, variable in enumerate(statistics):
            if variable.aggregation == "only_first_replica":
                continue
            before, after = _number(found[id(variable.value)].before), _number(host_array(variable))
            is_sum = variable.aggregation == "sum"
            if id(variable) in split or is_sum:  # As replica_consistency.share_statistics does.
                (total,) = ranks.sum([np.asarray(after, np.float64) - before])
                counts = is_sum or not keras.backend.is_float_dtype(variable.dtype)
                after = before + (total if counts else total / ranks.size)
            changes[f"{i} {variable.path}"] = Change(before, after)
        return changes

    @contextlib.contextmanager
    def _batch_normalization(self, ranks: Collectives) -> Iterator[None]:
        """In the block, batches are normalized over the samples of all of these ranks."""
        layers = [
            layer
            for layer in keras_internals.FLATTEN_LAYERS.of(self._model)()
            if isinstance(layer, keras.layers.BatchNormalization)
        ]
        with contextlib.ExitStack() as stack:
            for i, layer in enumerate(layers):
                own = getattr(type(layer), keras_internals.MOMENTS.name).__get__(layer)
                over_ranks = moments_over_ranks(
                    layer, f"hvdtrain_checked_batchnorm_{i}", ranks, lambda: None, gradient_weight_of_step
                )
                moments = over_ranks if ranks.reduces else own
                stack.callback(replace_method(layer, keras_internals.MOMENTS.name, moments))
            yield


def _means(returned: Mapping[str, Any], metrics: Mapping[str, Any], ranks: Collectives) -> dict[str, np.ndarray]:
    """The means over ranks of the numbers that a step returns; not of those that metrics have."""
    numbers = {
        name: np.asarray(each, np.float64)
        for name, each in _flat(returned)
        if name not in metrics and np.ndim(each) == 0 and np.issubdtype(np.asarray(each).dtype, np.number)
    }
    totals = ranks.sum(list(numbers.values()))
    return {name: total / ranks.size for name, total in zip(numbers, totals, strict=True)}


def _flat(returned: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that a step returns, by name; as in Keras, a metric of several values is a dictionary of them."""
    for name, value in returned.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


@contextlib.contextmanager
def _plain_updates(
    apply: Callable[[Any, Sequence[Gradient], Sequence[keras.Variable]], Sequence[Gradient]],
) -> Iterator[None]:
    """In the block, optimizers that are not distributed, as those of a tape, call a function before each update."""
    own = keras_internals.UPDATE.of(keras.optimizers.Optimizer)

    def update(optimizer: Any, gradients: Any, variables: Any, rate: Any) -> None:
        own(optimizer, apply(optimizer, gradients, variables), variables, rate)

    restore = replace_method(keras.optimizers.Optimizer, keras_internals.UPDATE.name, update)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _eager_functions() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _exact(config: ReductionConfig) -> ReductionConfig:
    return ReductionConfig(op=config.op, sparse_as_dense=config.sparse_as_dense)


def _number(tensor: Any) -> np.ndarray:
    array = np.asarray(tensor)
    return array if np.issubdtype(array.dtype, np.number) and array.dtype != np.float16 else array.astype(np.float32)


def _epsilon(dtype: str) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.get(dtype, 2.0**-7)
