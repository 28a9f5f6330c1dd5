"""``--autotune``: tries the few settings that affect speed but not the result, except for the order of sums."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from hvdtrain.commands.building import make_model
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session
from hvdtrain.config.fields import with_options
from hvdtrain.config.wording import flag_of
from hvdtrain.data import Data
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.optim.learning_rate import hold_weights
from hvdtrain.tasks.task import Task
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import sync_config
from hvdtrain.training.step_runner import StepRunner

_STEPS_PER_EXECUTION = (1, 4, 16)
_BLOCKS = 5
_BLOCK_S = 0.3
_MIN_GAIN = 0.02
"""A smaller difference is noise: then the first setting, which is the default, is kept."""


class MakesSteps(Protocol):
    """What a setting is measured on: a StepRunner, or a fake in tests."""

    def run_steps(self, steps: int, clock: Clock) -> None: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting and the time of a step with it."""

    name: str
    value: int | None
    step_ms: float


def tune(config: RunConfig, task: Task, data: Data, session: Session) -> RunConfig:
    """The configuration with the fastest settings, the same on every rank; all ranks must call it.

    Training afterwards is not affected by what was tried.

    Raises:
        StoppedEarly: the job was asked to stop.
    """
    collectives = session.collectives
    # Between two averages, a rank's steps in local SGD are those of a single process.
    step_collectives = SingleProcessCollectives() if config.training.mode == "local" else collectives

    def make_held_model(trial: RunConfig) -> keras.Model:
        model = make_model(trial, task, data, step_collectives)
        hold_weights(model)
        return model

    def make(trial: RunConfig) -> StepRunner:
        runner = on_every_rank(
            lambda: StepRunner(
                make_held_model(trial),
                data.training,
                sync_config(trial.training),
                collectives=step_collectives,
                job_watch=session.job_watch,
                logging=trial.training.logging,
            ),
            collectives,
        )
        runner.start()
        return runner

    chosen, trials = try_settings(config, make, session)
    keras.backend.clear_session()
    runtime.init(seed=config.training.seed)
    if collectives.rank == 0:
        print(f"autotune: {describe(trials, chosen)}", flush=True)
    return chosen


def try_settings(
    config: RunConfig, make: Callable[[RunConfig], MakesSteps], session: Session
) -> tuple[RunConfig, list[Trial]]:
    """Measures each setting on models that are thrown away; options that were set explicitly are not tried.

    Args:
        make: builds what makes steps, from a configuration.

    Returns:
        The configuration with the fastest settings, and all trials.
    """
    trials: list[Trial] = []
    settings: dict[str, Sequence[Any]] = {
        "steps_per_execution": () if "steps_per_execution" in config.explicitly_set else _STEPS_PER_EXECUTION,
        "groups": _groups(config, session.collectives),
    }
    for name, values in settings.items():
        if not values:
            continue
        configs = [with_options(config, {name: value}) for value in values]
        found = _measure([make(each) for each in configs], max(_STEPS_PER_EXECUTION), session)
        best = min(range(len(found)), key=found.__getitem__)
        if found[best] > (1 - _MIN_GAIN) * found[0]:
            best = 0
        config = configs[best]
        trials += [Trial(name, value, step_ms) for value, step_ms in zip(values, found, strict=True)]
    return config, trials


def _groups(config: RunConfig, collectives: Collectives) -> Sequence[int | None]:
    """Large gradients alone, or all in one bucket; if the order of sums may change."""
    is_free = config.training.mode == "sync" and config.reduction.is_linear and not config.runtime.deterministic
    return (None, 1) if is_free and collectives.size > 1 and "groups" not in config.explicitly_set else ()


def _measure(candidates: list[MakesSteps], unit: int, session: Session) -> list[float]:
    """The milliseconds of a step of each, for the slowest rank, interleaved; the same on every rank."""
    seconds: list[list[float]] = [[] for _ in candidates]
    steps = [unit] * len(candidates)
    for block in range(-2, _BLOCKS):
        for i, candidate in enumerate(candidates):
            if session.job_watch.check():
                raise StoppedEarly(
                    f"stopped while settings were tried ({session.job_watch.stop_reason}). Nothing was trained."
                )
            session.collectives.barrier()
            start_s = time.perf_counter()
            candidate.run_steps(steps[i], Clock())
            step_s = max(session.collectives.allgather(time.perf_counter() - start_s)) / steps[i]
            if block == -1:  # The one before has compiled.
                steps[i] = unit * max(1, round(_BLOCK_S / (unit * step_s)))
            seconds[i].append(step_s)
    return [1000 * statistics.median(each[2:]) for each in seconds]


def describe(trials: list[Trial], chosen: RunConfig) -> str:
    """One line: the settings that were chosen, and those that were tried."""
    if not trials:
        return "nothing to try"
    each = [
        f"{flag_of(one.name)} {'default' if one.value is None else one.value}: {one.step_ms:.3f} ms" for one in trials
    ]
    values = {"steps_per_execution": chosen.training.steps_per_execution, "groups": chosen.reduction.groups}
    names = dict.fromkeys(one.name for one in trials)
    taken = ", ".join(f"{flag_of(name)} {values[name] or 'default'}" for name in names)
    return f"{taken}: {_gain(trials, values)} (time of a step with {'; '.join(each)})"


def _gain(trials: list[Trial], chosen: Mapping[str, int | None]) -> str:
    """How much shorter steps are than with the settings that were tried first, which are the defaults."""
    left = 1.0
    for name in dict.fromkeys(one.name for one in trials):
        own = [one for one in trials if one.name == name]
        left *= next(one.step_ms for one in own if one.value == chosen[name]) / own[0].step_ms
    return "no setting makes steps shorter" if left == 1 else f"steps {1 - left:.0%} shorter"
