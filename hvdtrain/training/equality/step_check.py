"""The check of a program's step: made by all ranks, and by one process with the samples of all of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed.batch_norm import layers_of_each_rank
from hvdtrain.distributed.bounded_messages import num_bytes
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of, optimizer_variables
from hvdtrain.distributed.recurrent_states import recurrent_states
from hvdtrain.distributed.replica_consistency import differing, require_equal_variables, share
from hvdtrain.distributed.shards import row_shard_of, whole_variables
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.seams import keras_internals
from hvdtrain.system import error_text
from hvdtrain.system.terminal import some_of
from hvdtrain.training.equality.check_memory import lacking_memory
from hvdtrain.training.equality.comparison import Comparison, Deviation
from hvdtrain.training.equality.compiled_recurrence import compiled_recurrence
from hvdtrain.training.equality.different_models import differences_of_models
from hvdtrain.training.equality.draws import Draws
from hvdtrain.training.equality.frozen_weights import frozen_weights
from hvdtrain.training.equality.places import first_place, noted_places
from hvdtrain.training.equality.samples import Rows, Samples, gather_samples
from hvdtrain.training.equality.single_precision import computes_in_half_precision, single_precision
from hvdtrain.training.equality.updates import Update
from hvdtrain.training.equality.ways import CheckedStep, Outcome
from hvdtrain.training.equality.written_variables import WrittenVariables
from hvdtrain.training.metric_state import require_sums_from_the_start

SAME_SAMPLES = (
    "ranks must train on different samples. Received: the same batch on every rank. Pass the data through "
    "hvdtrain.shard, or let each rank draw its own samples"
)
_SIZES = (
    "batches of different sizes must be weighted by their samples. Received: batches of {sizes} samples on the ranks, "
    "each of which counts as one; with batches of one size, the step is that of one process. Give all ranks batches of "
    "one size, or train by model.fit without gradient accumulation, or by hvdtrain.Trainer, which weigh them"
)
_BATCHES_COUNTED = (
    "metric {name!r} counts batches, not samples: with batches of {sizes} samples on the ranks, it differs from that "
    "of one process by {share}. Pass the number of samples to its update_state, as sample_weight"
)
_KINDS = {"gradient": "gradients", "variable": "variables", "value": "metrics", "returned": "other values"}
_RETURNED = (
    "{name!r}, which train_step returns, is the mean of the values of all ranks, and differs from that of one process "
    "by {share}"
)
# By how many units in the last place weights are changed: a single activation of a ReLU that changes its side may be
# all that differs, and only some changes show one. Large changes first, which show more: what is found depends on all.
_PERTURBATIONS = (128, 64, 32, 16, 8, 4, 2, 1)
# What a step writes is copied several times.
_MAX_TABLE_BYTES = 256 << 20
_MAX_LAYERS = 4
# The rounding of a few steps does not show the largest that may occur.
_SAFETY = 4

_NORMALIZE_ALONE = (
    "BatchNormalization takes mean and variance over each rank's samples in {}, where one process would take them over "
    "those of all ranks. Made with synchronized=True, it does so too"
)
_ONLY_SEEM_SYNCHRONIZED = (
    "BatchNormalization(synchronized=True) must normalize over the samples of all ranks. Received: layer {!r}, which "
    "normalizes over those of each rank. Call hvdtrain.synchronize_batch_normalization(model) before the loop"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found; the same on all ranks."""

    compared: dict[str, int]
    """How many gradients, variables and values were compared."""
    largest: float = 0.0
    """The largest difference of a gradient, relative to it."""
    unequal: str | None = None
    """Rule, what was received, and the remedy; None if the steps are equal."""
    noted: str | None = None
    """What differs, and does not end training; None if nothing does."""
    unchecked: str | None = None
    """Why the step could not be checked; None if it was."""
    first: Deviation | None = None
    """The first difference, if the steps are not equal."""

    @property
    def summary(self) -> str:
        """What was compared, in words."""
        counts = ", ".join(f"{number} {_KINDS[kind]}" for kind, number in self.compared.items() if number)
        return f"{counts}; the gradients differ by at most {self.largest:.1g} of their norms"


class StepCheck:
    """Checks a step, and leaves no trace of it: variables and generators of random numbers are put back.

    Args:
        step: receives the samples, and makes a step of the model.
        model: what it trains.
        collectives: the ranks that make steps together.
        unweighted: the same step, whose losses are not multiplied by the number of a rank's samples, so that they can
            be compared (default: the step).
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        model: keras.Model,
        collectives: Collectives,
        *,
        unweighted: Callable[[Any], Any] | None = None,
    ):
        self._model = model
        self._collectives = collectives
        self._step = CheckedStep(step, model, collectives)
        self._unweighted = CheckedStep(unweighted or step, model, collectives)
        self.restart()

    def restart(self) -> None:
        """Draws as in the first check again, as ranks do that have made none."""
        self._num_checks = 0

    @property
    def is_within_update(self) -> bool:
        """Whether an optimizer holds gradients of micro-batches, which each rank accumulates by itself."""
        return any(
            int(keras_internals.ITERATIONS.of(leaf)) % (leaf.gradient_accumulation_steps or 1)
            for leaf in leaves_of(self._model)
        )

    def run(self, batch: Any) -> Finding:
        """Checks the step with a part of each rank's batch. All ranks must call it.

        Raises:
            DivergenceError: on every rank: replicas are not equal any more.
            UsageError: on every rank: a metric's state does not start at 0.
        """
        finding = self._find(batch)
        if finding.unequal is not None:
            if not (found := differences_of_models(self._model, self._collectives)):
                return finding
            return dataclasses.replace(
                finding, unequal=f"{finding.unequal}. The models of the ranks differ, which may be the cause: {found}"
            )
        # The check has normalized over all ranks.
        if finding.noted is None and finding.unchecked is None and (lone := self._lone_layers()):
            names = some_of([repr(each.name) for each in lone], at_most=_MAX_LAYERS)
            return dataclasses.replace(finding, noted=_NORMALIZE_ALONE.format(names))
        return finding

    def _find(self, batch: Any) -> Finding:
        if self.is_within_update:
            return Finding({}, unchecked="an optimizer holds gradients of micro-batches; check it after an update")
        self._require_equal_replicas()
        require_sums_from_the_start(self._model)
        samples = gather_samples(batch, self._collectives)
        if samples is None:
            return Finding({}, unchecked="a rank has no samples")
        if samples.are_the_same:
            return Finding({}, unequal=SAME_SAMPLES)
        if lone := [each for each in self._lone_layers() if each.synchronized]:
            return Finding({}, unequal=_ONLY_SEEM_SYNCHRONIZED.format(lone[0].name))
        if (table_bytes := self._table_bytes()) > _MAX_TABLE_BYTES:
            size = f"{table_bytes / 1e9:,.1f} GB"
            return Finding({}, unchecked=f"a check would copy its sharded tables and their state, {size} on each rank")
        if (reason := lacking_memory(self._model, self._collectives)) is not None:
            return Finding({}, unchecked=reason)
        if recurrent_states(self._model):
            return Finding({}, unchecked="its layers keep states of the samples of each rank's last batch")
        finding = self._check(samples)
        if finding.unequal is None or samples.rows.are_equally_many:
            return finding
        equally_many = gather_samples(batch, self._collectives, equally_many=True)
        assert equally_many is not None
        of_equal_sizes = self._check(equally_many)
        if of_equal_sizes.unequal is not None or of_equal_sizes.unchecked is not None:
            return of_equal_sizes if of_equal_sizes.unequal is not None else finding
        return _due_to_sizes(finding, samples.rows)

    def _check(self, samples: Samples) -> Finding:
        self._num_checks += 1
        draws = Draws(samples.rows, seed=1000 * self._num_checks)
        with self._equal_statistics(), compiled_recurrence():
            try:
                whole = self._step.of_one_process(samples.whole, draws.kept, _as_it_is)
                problem = None
            except Exception as error:  # A program may refuse a batch of another size.
                whole, problem = Outcome(), error_text.class_and_message(error)
            everyone = self._collectives.allgather((problem, draws.digest()))
            problems = [each for each, _ in everyone if each is not None]
            if problems:
                return Finding({}, unchecked=f"one process cannot make its step: {problems[0]}")
            if any(digest != everyone[0][1] for _, digest in everyone):
                return Finding({}, unchecked="it draws random numbers that do not depend on a seed")
            if not whole.updates:
                return Finding({}, unchecked="it makes no update")
            return self._compare(samples, draws, whole, self._step.epsilon)

    def _lone_layers(self) -> list[keras.layers.BatchNormalization]:
        return layers_of_each_rank(self._model) if self._collectives.reduces else []

    def _table_bytes(self) -> int:
        variables = [*self._model.weights, *optimizer_variables(self._model)]
        return sum(num_bytes(v.value) for v in variables if row_shard_of(v) is not None)

    def _require_equal_replicas(self) -> None:
        variables = whole_variables([*self._model.trainable_weights, *optimizer_variables(self._model)])
        require_equal_variables(
            variables,
            self._collectives,
            when="After a step,",
            cause="It was changed other than by gradients that are the same on all ranks: by a gradient that was not "
            "reduced, or by an optimizer that is not wrapped in hvdtrain.DistributedOptimizer.",
        )
        require_equal_variables(
            whole_variables(frozen_weights(self._model)),
            self._collectives,
            when="After a step, frozen",
            cause="No gradient makes it equal. Load or freeze weights before hvdtrain.broadcast(model) is called.",
        )

    def _compare(self, samples: Samples, draws: Draws, whole: Outcome, epsilon: float) -> Finding:
        comparison = Comparison(whole, epsilon)
        comparison.begin()
        outcome = self._step.of_all_ranks(samples.part, draws.repeated, comparison.apply)
        deviations = comparison.deviations(outcome)
        suspects = [each for each in deviations if not each.size <= each.rounding]
        found, problem = None, None
        # Of sharded tables, ranks compare different rows.
        if any(self._collectives.allgather(bool(suspects))):
            found, problem = self._without_rounding(samples, draws, comparison, suspects)
        everyone = self._collectives.allgather((found, problem))
        compared = {kind: sum(each.kind == kind for each in deviations) for kind in _KINDS}
        largest = max((each.relative for each in deviations if each.kind == "gradient" and each.scale), default=0.0)
        problems = [each for _, each in everyone if each is not None]
        first = next((each for each, _ in everyone if each is not None), None)
        if problems:
            return Finding(compared, largest, unchecked=problems[0])
        if first is None or self._is_equal_in_single_precision(samples, draws, epsilon):
            return Finding(compared, largest)
        if first.kind == "returned":
            return Finding(compared, largest, noted=_RETURNED.format(name=first.name, share=_size(first)))
        return Finding(compared, largest, self._explain(samples, draws, comparison, first), first=first)

    def _without_rounding(
        self, samples: Samples, draws: Draws, comparison: Comparison, suspects: list[Deviation]
    ) -> tuple[Deviation | None, str | None]:
        """The first deviation that rounding does not explain, or why there is none to be found."""
        rounding: dict[tuple[str, str], float] = {}
        remaining, problem = suspects, None
        for perturb in (0, *_PERTURBATIONS):
            comparison.begin()
            again = self._step.of_one_process(samples.whole, draws.repeated, comparison.apply, perturb)
            for each in comparison.deviations(again):
                if not perturb and not each.size <= each.rounding and not np.isnan(each.size):
                    problem = problem or f"two equal steps of one process differ, in {_text(each)}"
                key = each.kind, each.name
                rounding[key] = max(rounding.get(key, 0.0), each.size)
            remaining = [
                each
                for each in suspects
                # Not a number in both: the guards of training report it.
                if not np.isnan(each.size) and np.isfinite(each.scale)
                if each.size > each.rounding + _SAFETY * rounding.get((each.kind, each.name), 0.0)
            ]
            everyone = self._collectives.allgather((problem, bool(remaining)))
            if any(each is not None for each, _ in everyone) or not any(remains for _, remains in everyone):
                return None, problem
        return (remaining[0] if remaining else None), None

    def _is_equal_in_single_precision(self, samples: Samples, draws: Draws, epsilon: float) -> bool:
        """Whether layers compute in half precision, and the steps are equal if they compute in single precision.

        Args:
            epsilon: the rounding of one operation in half precision, which others than layers may compute in.
        """
        if not computes_in_half_precision(self._model):
            return False
        with single_precision(self._model):
            try:
                whole = self._step.of_one_process(samples.whole, draws.repeated, _as_it_is)
            except Exception:  # A program may rely on half precision.
                whole = None
            if any(self._collectives.allgather(whole is None)):
                return False
            assert whole is not None
            finding = self._compare(samples, draws, whole, epsilon)
            return finding.first is None and finding.unchecked is None

    def _explain(self, samples: Samples, draws: Draws, comparison: Comparison, found: Deviation) -> str:
        place = None
        if found.kind in ("gradient", "updates", "variable"):
            with noted_places() as of_whole:
                self._unweighted.of_one_process(samples.whole, draws.repeated, _as_it_is)
            comparison.begin()
            with noted_places() as of_part:
                self._unweighted.of_all_ranks(samples.part, draws.repeated, comparison.apply)
            sums = any(pipeline.reduce.config.op == "sum" for _, pipeline in pipelines_of(self._model))
            epsilon = self._step.epsilon
            place = first_place(of_whole, of_part, samples.rows, self._collectives, epsilon=epsilon, sums=sums)
        return f"{place or _rule(found)}. {_in_all(found)}"

    @contextlib.contextmanager
    def _equal_statistics(self) -> Iterator[None]:
        """In the block, all ranks have the same statistics, as one process has."""
        statistics = whole_variables(self._model.non_trainable_weights)
        split = differing(statistics, self._collectives)
        written = WrittenVariables()
        try:
            with written.noted():
                share([v for v in statistics if keras.backend.is_float_dtype(v.dtype)], self._collectives)
                others = [v for v in statistics if id(v) in split and not keras.backend.is_float_dtype(v.dtype)]
                first = self._collectives.allgather([v.numpy() for v in others])[0] if others else []
                for variable, value in zip(others, first, strict=True):
                    variable.assign(value)
            yield
        finally:
            written.restore()


def _as_it_is(leaf: Any, update: Update) -> Any:
    return update.gradients


def _due_to_sizes(finding: Finding, rows: Rows) -> Finding:
    """What to say of a difference that is none with batches of equal sizes."""
    sizes = " and ".join(str(each) for each in rows.sizes)
    found = finding.first
    assert found is not None
    if found.kind == "value":
        noted = _BATCHES_COUNTED.format(name=found.name, sizes=sizes, share=_size(found))
        return dataclasses.replace(finding, unequal=None, first=None, noted=noted)
    return dataclasses.replace(finding, unequal=f"{_SIZES.format(sizes=sizes)}. {_in_all(found)}")


def _in_all(found: Deviation) -> str:
    return f"In all, {_text(found)} differs from that of one process by {_size(found)}"


def _rule(found: Deviation) -> str:
    if found.kind == "value":
        return (
            f"a metric must be a sum over samples, or a ratio of such sums. Received: {found.name!r}, which is not. "
            "Write it as sums, or compute it in a callback"
        )
    if found.kind == "variable":
        return (
            f"a step must update its variables as one process does. Received: {_text(found)}, which is updated "
            "otherwise. Update it from gathered samples (hvdtrain.gather), or from reduced gradients"
        )
    return (
        f"gradients must be averaged over ranks before anything else uses them. Received: {_text(found)}, which was "
        "changed between tape and update. Average it before by hvdtrain.average"
    )


def _text(found: Deviation) -> str:
    name = found.name.split(" ", 1)[-1]
    return {
        "updates": found.name,
        "gradient": f"the gradient of {name!r}",
        "variable": f"variable {name!r}",
        "value": f"the value of {found.name!r}",
        "returned": f"the value of {found.name!r}",
    }[found.kind]


def _size(found: Deviation) -> str:
    return f"{found.relative:.2g} of it" if np.isfinite(found.relative) else "all of it"
