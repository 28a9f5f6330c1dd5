"""Tries the few settings that decide how fast steps are, and not what they come to but for the order of sums."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdtrain.collectives import Collectives
from hvdtrain.config import TrainConfig, flag_of
from hvdtrain.errors import StoppedEarly
from hvdtrain.failure import JobWatch
from hvdtrain.timing.clock import Clock

_STEPS_PER_CALL = (1, 4, 16)
_BLOCKS = 5
_BLOCK_S = 0.3
_MIN_GAIN = 0.02
"""What differs by less is noise: then the first setting, which is the default, stays."""


class MakesSteps(Protocol):
    """What is measured; a Trainer is one."""

    def make_steps(self, steps: int, clock: Clock) -> None: ...


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting and what a step took with it."""

    name: str
    value: int | None
    step_ms: float


def tune(
    config: TrainConfig, make: Callable[[TrainConfig], MakesSteps], collectives: Collectives, watch: JobWatch
) -> tuple[TrainConfig, list[Tried]]:
    """Measures each setting on trainers that are thrown away; what was asked for is not tried.

    Every rank has to call it.

    Args:
        make: a trainer of its own for each configuration.

    Returns:
        The configuration with the fastest settings, the same on every rank, and all that were tried.

    Raises:
        StoppedEarly: the job was asked to stop.
    """
    tried: list[Tried] = []
    settings: dict[str, Sequence[Any]] = {
        "steps_per_call": _steps_per_call(config),
        "groups": _groups(config, collectives),
    }
    for name, values in settings.items():
        if not values:
            continue
        changes: list[dict[str, Any]] = [{name: value} for value in values]
        configs = [dataclasses.replace(config, **each) for each in changes]
        found = _measure([make(each) for each in configs], max(_STEPS_PER_CALL), collectives, watch)
        best = min(range(len(found)), key=found.__getitem__)
        if found[best] > (1 - _MIN_GAIN) * found[0]:
            best = 0
        config = configs[best]
        tried += [Tried(name, value, step_ms) for value, step_ms in zip(values, found, strict=True)]
    return config, tried


def _steps_per_call(config: TrainConfig) -> Sequence[int]:
    return () if "steps_per_call" in config.given else _STEPS_PER_CALL


def _groups(config: TrainConfig, collectives: Collectives) -> Sequence[int | None]:
    """Large gradients by themselves, or all at once; where sums may be added up in another order."""
    is_free = config.mode == "sync" and config.op != "adasum" and not config.deterministic
    return (None, 1) if is_free and collectives.size > 1 and "groups" not in config.given else ()


def _measure(trainers: list[MakesSteps], unit: int, collectives: Collectives, watch: JobWatch) -> list[float]:
    """The milliseconds of a step of each, for the slowest rank, in turn; the same on every rank."""
    seconds: list[list[float]] = [[] for _ in trainers]
    steps = [unit] * len(trainers)
    for block in range(-2, _BLOCKS):
        for i, trainer in enumerate(trainers):
            if watch.check():
                raise StoppedEarly(f"stopped while settings were tried ({watch.stop_reason}). Nothing was trained.")
            collectives.barrier()
            began_s = time.perf_counter()
            trainer.make_steps(steps[i], Clock())
            took_s = max(collectives.allgather(time.perf_counter() - began_s)) / steps[i]
            if block == -1:  # The one before has compiled.
                steps[i] = unit * max(1, round(_BLOCK_S / (unit * took_s)))
            seconds[i].append(took_s)
    return [1000 * statistics.median(each[2:]) for each in seconds]


def told(tried: list[Tried], chosen: TrainConfig) -> str:
    """One line: what was tried, and what is taken."""
    if not tried:
        return "nothing is left to try"
    each = [
        f"{flag_of(one.name)} {'default' if one.value is None else one.value}: {one.step_ms:.3f} ms" for one in tried
    ]
    names = dict.fromkeys(one.name for one in tried)
    taken = ", ".join(f"{flag_of(name)} {getattr(chosen, name) or 'default'}" for name in names)
    return f"{taken} (a step took with {'; '.join(each)})"
