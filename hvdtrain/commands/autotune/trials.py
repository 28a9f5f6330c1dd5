"""Trials: times steps with each of the settings that affect speed but not the result, except for the order of sums."""

import dataclasses
import statistics
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

_STEPS_PER_EXECUTION = (1, 4, 16)
BLOCKS, BLOCK_S = 5, 0.3
"""How often each setting is measured, and for how many seconds."""
_MIN_GAIN = 0.02
"""A smaller difference is noise: then the first setting, which is the default, is kept."""

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
        self._session = session
        call = config.training.steps_per_execution
        start_s = time.perf_counter()
        self._runner = make(config)
        self._time(call)
        self.start_s = max(session.collectives.allgather(time.perf_counter() - start_s))
        """Seconds to build and compile it, on the slowest rank."""
        self._block = call * max(1, round(BLOCK_S / (call * self._time(call))))
        self.step_s = self.measure()
        """Seconds per step, of one block."""

    def measure(self) -> float:
        """Seconds per step of the slowest rank, over a block of steps; the same on every rank.

        Raises:
            StoppedEarly: the job was asked to stop.
        """
        return self._time(self._block)

    def _time(self, steps: int) -> float:
        collectives, job_watch = self._session.collectives, self._session.job_watch
        if job_watch.check():
            raise StoppedEarly(f"stopped while settings were tried ({job_watch.stop_reason}). Nothing was trained.")
        collectives.barrier()
        start_s = time.perf_counter()
        self._runner.run_steps(steps, Clock())
        return max(collectives.allgather(time.perf_counter() - start_s)) / steps


def settings_to_try(config: RunConfig, collectives: Collectives) -> Settings:
    """Those that may make these steps shorter; options that were set explicitly are not tried."""
    settings: dict[str, Sequence[Any]] = {"steps_per_execution": _STEPS_PER_EXECUTION}
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
        fastest = min(range(len(seconds)), key=seconds.__getitem__)
        if seconds[fastest] <= (1 - _MIN_GAIN) * seconds[0]:
            best = candidates[fastest]
        trials += [Trial(name, value, 1000 * each) for value, each in zip(values, seconds, strict=True)]
    return best.config, trials


def interleaved(candidates: Sequence[Candidate]) -> list[float]:
    """The seconds of a step of each; the same on every rank."""
    blocks = [[each.measure() for each in candidates] for _ in range(BLOCKS)]
    return [statistics.median(each) for each in zip(*blocks, strict=True)]


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
