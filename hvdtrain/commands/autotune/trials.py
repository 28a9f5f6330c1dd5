"""Trials: times steps with each of the settings that affect speed but not the result, except for the order of sums."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session
from hvdtrain.config.fields import as_dict, with_options
from hvdtrain.config.wording import flag_of
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import StoppedEarly
from hvdtrain.system import devices
from hvdtrain.training.clock import Clock
from hvdtrain.training.step_trials import BLOCK_S, BLOCKS, STEPS_PER_EXECUTION, TimedSteps, fastest, interleaved

Settings = Mapping[str, Sequence[Any]]
"""The values to try of each option, that of the configuration first."""


class MakesSteps(Protocol):
    """What a setting is measured on: a StepRunner, or a fake in tests."""

    def run_steps(self, steps: int, clock: Clock) -> None: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting and the time of a step with it."""

    name: str
    value: Any
    step_ms: float


class Candidate:
    """Compiled steps of one configuration. Collective: all ranks must make it, and measure it.

    Args:
        make: builds what makes steps, from a configuration.
    """

    def __init__(self, config: RunConfig, make: Callable[[RunConfig], MakesSteps], session: Session):
        self.config = config
        self._job_watch = session.job_watch
        start_s = time.perf_counter()
        runner = make(config)
        call = config.training.steps_per_execution
        self._steps = TimedSteps(lambda steps: self._run(runner, steps), call, session.collectives, start_s=start_s)
        self.start_s, self.step_s = self._steps.start_s, self._steps.step_s

    def measure(self) -> float:
        """Seconds per step of the slowest rank, over a block of steps; the same on every rank.

        Raises:
            StoppedEarly: the job was asked to stop.
        """
        return self._steps.measure()

    def _run(self, runner: MakesSteps, steps: int) -> None:
        if self._job_watch.check():
            reason = self._job_watch.stop_reason
            raise StoppedEarly(f"stopped while settings were tried ({reason}). Nothing was trained.")
        runner.run_steps(steps, Clock())


def settings_to_try(config: RunConfig, collectives: Collectives) -> Settings:
    """Those that may make these steps shorter; options that were set explicitly are not tried."""
    settings: dict[str, Sequence[Any]] = {"steps_per_execution": STEPS_PER_EXECUTION}
    reorders_sums = config.training.mode == "sync" and config.reduction.is_linear and not config.runtime.deterministic
    if reorders_sums and collectives.size > 1:
        settings["groups"] = (None, 1)  # Large gradients alone, or all in one bucket.
    if devices.has_gpu():
        settings["prefetch_to_device"] = (False, True)
    own = as_dict(config)
    return {
        name: (own[name], *(each for each in values if each != own[name]))
        for name, values in settings.items()
        if name not in config.explicitly_set
    }


def cost_s(settings: Settings, default: Candidate) -> float:
    """About how many seconds it takes to try these settings, in addition to making ``default``."""
    block_s = max(BLOCK_S, default.step_s * max([1, *settings.get("steps_per_execution", ())]))
    others_s = default.start_s * sum(len(values) - 1 for values in settings.values())
    return others_s + block_s * BLOCKS * sum(len(values) for values in settings.values())


def try_settings(
    default: Candidate, settings: Settings, make: Callable[[RunConfig], Candidate]
) -> tuple[RunConfig, list[Trial]]:
    """Measures each setting, with the best ones of those before it.

    Returns:
        The configuration with the fastest settings, and all trials.
    """
    best, trials = default, list[Trial]()
    for name, values in settings.items():
        candidates = [best, *(make(with_options(best.config, {name: value})) for value in values[1:])]
        seconds = interleaved(candidates)
        best = candidates[fastest(seconds)]
        trials += [Trial(name, value, 1000 * each) for value, each in zip(values, seconds, strict=True)]
    return best.config, trials


def describe(trials: Sequence[Trial], chosen: RunConfig) -> str:
    """One line: the settings that were chosen, and those that were tried."""
    values, names = as_dict(chosen), dict.fromkeys(one.name for one in trials)
    taken = ", ".join(_setting(name, values[name]) for name in names)
    each = "; ".join(f"{_setting(one.name, one.value)}: {one.step_ms:.3f} ms" for one in trials)
    return f"{taken}: {_gain(trials, values)} (time of a step with {each})"


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else f"no {flag_of(name)}"
    return f"{flag_of(name)} {'default' if value is None else value}"


def _gain(trials: Sequence[Trial], chosen: Mapping[str, Any]) -> str:
    """How much shorter steps are than with the settings that were tried first, which are the defaults."""
    left = 1.0
    for name in dict.fromkeys(one.name for one in trials):
        own = [one for one in trials if one.name == name]
        left *= next(one.step_ms for one in own if one.value == chosen[name]) / own[0].step_ms
    return "no setting makes steps shorter" if left == 1 else f"steps {1 - left:.0%} shorter"
