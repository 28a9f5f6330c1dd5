"""The training loop: the order of things; how they are done stands elsewhere."""

import time
from typing import Any

import keras
import numpy as np

from hvdtrain import replicas, runtime
from hvdtrain.data import Arrays, evaluation_dataset, training_dataset
from hvdtrain.errors import UsageError
from hvdtrain.metrics import reduced_results
from hvdtrain.optimizer import DistributedOptimizer, communication_ms, gradient_bytes, is_distributed
from hvdtrain.report import NullReporter, Reporter
from hvdtrain.sampling import SamplePlan
from hvdtrain.steps import CompiledSteps


class Trainer:
    """Trains a compiled Keras model on all ranks as one process would train it on the whole batch.

    Args:
        model: built and compiled; its optimizer is made distributed if it is not yet.
        training: the samples to train on, all of them on every rank; each rank reads its share.
        evaluation: the samples to evaluate on, likewise; None: no evaluation.
        batch_size: samples per rank and micro-batch.
        steps: updates to make; or ``epochs``.
        epochs: passes over the samples; or ``steps``.
        seed: of the order of samples.
        accumulate: micro-batches per step, one allreduce for all. More than 1 needs an optimizer
            with ``gradient_accumulation_steps`` of the same value.
        steps_per_call: steps in one compiled call.
        log_every, eval_every, check_every: in steps; ``eval_every=0``: at the end of each epoch;
            ``check_every=0``: variables are compared over ranks only at the end.
        reporter: told what happens (default: nobody).

    Raises:
        UsageError: an argument breaks its rule.
    """

    def __init__(
        self,
        model: keras.Model,
        training: Arrays,
        evaluation: Arrays | None = None,
        *,
        batch_size: int,
        steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        accumulate: int = 1,
        remainder: str = "pad",
        steps_per_call: int = 1,
        log_every: int = 10,
        eval_every: int = 0,
        check_every: int = 500,
        reporter: Reporter | None = None,
    ):
        self._collectives = runtime.current().collectives
        self._hosts = self._collectives.cross_size
        self._plan = SamplePlan(
            num_samples=training.num_samples,
            batch_size=batch_size,
            rank=self._collectives.rank,
            size=self._collectives.size,
            seed=seed,
            accumulate=accumulate,
            remainder=remainder,
        )
        if (steps is None) == (epochs is None):
            raise UsageError(f"give either steps or epochs. Received: steps={steps}, epochs={epochs}")
        self._total_steps = steps if steps is not None else (epochs or 0) * self._plan.steps_per_epoch
        if (getattr(model.optimizer, "gradient_accumulation_steps", None) or 1) != accumulate:
            raise UsageError(
                f"accumulate must equal the optimizer's gradient_accumulation_steps. Received: {accumulate} and "
                f"{model.optimizer.gradient_accumulation_steps}"
            )
        self.model = model
        self._training = training
        self._evaluation = evaluation
        if not is_distributed(model.optimizer):
            DistributedOptimizer(model.optimizer, collectives=self._collectives)
        self._eval_every = eval_every or self._plan.steps_per_epoch
        self._log_every = log_every
        self._check_every = check_every
        self._steps = CompiledSteps(model, steps_per_call=steps_per_call, accumulate=accumulate)
        self._reporter = reporter or NullReporter()
        self.step = 0
        """Steps made."""

    @property
    def plan(self) -> SamplePlan:
        """This rank's share of the samples."""
        return self._plan

    @property
    def total_steps(self) -> int:
        """Steps that :meth:`fit` makes."""
        return self._total_steps

    def fit(self) -> dict[str, Any]:
        """Trains.

        Returns:
            What a run's ``summary.json`` holds, but for what only the command line knows.

        Raises:
            DisagreementError: ranks differ in data or model.
            DivergenceError: replicas that must be equal are not.
            UsageError: it was called before.
        """
        if self.step:
            raise UsageError(
                f"fit() may be called once. This trainer has made its {self.step} steps; make another one."
            )
        self._start()
        clock = _Clock()
        iterator = iter(training_dataset(self._training, self._plan))
        evaluated: dict[str, float] = {}
        values: dict[str, float] = {}
        while self.step < self._total_steps:
            if self.step % self._plan.steps_per_epoch == 0:
                self.model.reset_metrics()
            clock.start_call()
            made, _ = self._steps.train(iterator, self._steps_to_next_event())
            clock.end_call(made)
            self.step += made
            if self._is_due(self._log_every):
                values = reduced_results(self.model, self._collectives)
                self._reporter.progressed(self.step, {**values, **clock.speed_since_last(self._plan.global_batch_size)})
            if self._check_every and self._is_due(self._check_every):
                replicas.require_equal_replicas(self.model, self._collectives, self.step)
            if self._evaluation is not None and self._is_due(self._eval_every):
                evaluated = self.evaluate()
                self._reporter.evaluated(self.step, evaluated)
        return self._summary(clock, values, evaluated)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over all evaluation samples, each counted once; the same on every rank."""
        assert self._evaluation is not None
        training_state = [variable.numpy() for variable in self.model.metrics_variables]
        replicas.share_statistics(self.model, self._collectives)
        dataset = evaluation_dataset(
            self._evaluation, self._plan.batch_size, self._collectives.rank, self._collectives.size
        )
        self._steps.evaluate(dataset)
        results = reduced_results(self.model, self._collectives)
        for variable, value in zip(self.model.metrics_variables, training_state, strict=True):
            variable.assign(value)
        return results

    def _start(self) -> None:
        arguments = {
            "batch_size": self._plan.batch_size,
            "steps": self._total_steps,
            "seed": self._plan.seed,
            "accumulate": self._plan.accumulate,
            "remainder": self._plan.remainder,
            "log_every": self._log_every,
            "eval_every": self._eval_every,
            "check_every": self._check_every,
            "steps_per_call": self._steps.steps_per_call,
        }
        replicas.require_agreement("arguments of Trainer", arguments, self._collectives)
        replicas.require_agreement("training data", self._training.facts(), self._collectives)
        evaluation = {} if self._evaluation is None else self._evaluation.facts()
        replicas.require_agreement("evaluation data", evaluation, self._collectives)
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        replicas.require_agreement("model", replicas.structure(self.model), self._collectives)
        replicas.broadcast(self.model, collectives=self._collectives)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self._total_steps

    def _steps_to_next_event(self) -> int:
        """No call runs past a step at which something is to happen."""
        intervals = [self._log_every, self._eval_every, self._plan.steps_per_epoch]
        if self._check_every:
            intervals.append(self._check_every)
        return min(self._total_steps - self.step, *(every - self.step % every for every in intervals))

    def _summary(self, clock: "_Clock", values: dict[str, float], evaluated: dict[str, float]) -> dict[str, Any]:
        replicas.require_equal_replicas(self.model, self._collectives, self.step)
        step_ms = clock.step_ms()
        full_epochs, rest = divmod(self.step, self._plan.steps_per_epoch)
        in_epoch = self._plan.num_samples
        if self._plan.remainder == "drop":
            in_epoch = self._plan.steps_per_epoch * self._plan.global_batch_size
        communicating_ms = communication_ms(self.model.optimizer)
        return {
            "mode": "sync",
            "ranks": self._plan.size,
            "hosts": self._hosts,
            "steps": self.step,
            "epochs": self.step / self._plan.steps_per_epoch,
            "samples": full_epochs * in_epoch + rest * self._plan.global_batch_size,
            "loss": values.get("loss"),
            "metrics": {name: value for name, value in values.items() if name != "loss"},
            "eval": evaluated,
            "wall_seconds": clock.wall_seconds(),
            "examples_per_second": self._plan.global_batch_size / clock.seconds_per_step(),
            "step_ms": step_ms,
            "communication_fraction": min(1.0, communicating_ms / step_ms["p50"]),
            "bytes_reduced": self.step * gradient_bytes(self.model.optimizer),
            "averaging_rounds": 0,
            "resumed_from": None,
            "weights_sha256": replicas.weights_sha256(self.model),
        }


class _Clock:
    """Times the calls of a run. The first call of each length compiles; it is left out where others exist."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._call_began_s = 0.0
        self._lengths_seen: set[int] = set()
        self._compiling: list[tuple[int, float]] = []
        self._compiled: list[tuple[int, float]] = []
        self._told = 0

    def start_call(self) -> None:
        self._call_began_s = time.perf_counter()

    def end_call(self, steps: int) -> None:
        call = (steps, time.perf_counter() - self._call_began_s)
        (self._compiled if steps in self._lengths_seen else self._compiling).append(call)
        self._lengths_seen.add(steps)

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began_s

    def speed_since_last(self, examples_per_step: int) -> dict[str, float]:
        """Over the calls since this was last asked."""
        recent = self._compiled[self._told :] or self._compiling
        self._told = len(self._compiled)
        seconds_per_step = _seconds_per_step(recent)
        return {"examples/s": examples_per_step / seconds_per_step, "s/batch": seconds_per_step}

    def seconds_per_step(self) -> float:
        """The mean over the run."""
        return _seconds_per_step(self._compiled or self._compiling)

    def step_ms(self) -> dict[str, float]:
        """Median and 95th percentile of the time of a step, in milliseconds."""
        milliseconds = [1000 * seconds / steps for steps, seconds in self._compiled or self._compiling]
        return {"p50": float(np.percentile(milliseconds, 50)), "p95": float(np.percentile(milliseconds, 95))}


def _seconds_per_step(calls: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in calls) / sum(steps for steps, _ in calls)
