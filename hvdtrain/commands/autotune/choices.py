"""Choices of ``--autotune``, kept in the user's cache folder for later runs of the same kind."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.commands.autotune.trials import Settings
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import RANK_OPTIONS
from hvdtrain.config.fields import as_dict, option_names
from hvdtrain.data import Source
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.fault_tolerance.config import JobWatchConfig
from hvdtrain.optim.config import LearningRateConfig
from hvdtrain.system import cores, environment, versions
from hvdtrain.system.atomic_files import write_text
from hvdtrain.system.json_files import read_object

_WITHOUT_EFFECT = {
    *(name for kind in (LearningRateConfig, CheckpointConfig, JobWatchConfig) for name in option_names(kind)),
    *RANK_OPTIONS,
    *("steps", "epochs", "eval_every", "seed", "autotune", "autotune_limit"),
}
"""Options that change neither the time of a step nor what is tried."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was found out about runs of one kind."""

    step_s: float
    """Seconds per step with the configuration as it is."""
    cost_s: float
    """About how many seconds it takes to try all settings."""
    options: dict[str, Any] | None = None
    """The fastest settings; None: they were not tried."""
    summary: str = ""
    """What was chosen, and what it gained."""


def key(config: RunConfig, tried: Iterable[str], model: keras.Model, source: Source, collectives: Collectives) -> str:
    """A digest of all that the fastest settings depend on. Collective.

    Args:
        tried: the names of the settings that would be tried.
        model: built.
    """
    topology = runtime.current().topology
    machine = [
        *(cores.processor(), cores.usable_cores(), topology.threads, topology.local_size, topology.device),
        environment.performance_settings(),
    ]
    facts = {
        "model": _structure(model),
        "data": source.facts(),
        "options": {name: value for name, value in as_dict(config).items() if name not in _WITHOUT_EFFECT},
        "tried": sorted(tried),
        "versions": versions.versions(),
        "machines": collectives.allgather(machine),
        "launcher": topology.launcher,
        "hosts": topology.cross_size,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def path_of(name: str) -> Path:
    """The file of a choice.

    Args:
        name: its :func:`key`.
    """
    return environment.cache_dir() / "autotune" / f"{name}.json"


def read(path: Path, settings: Settings) -> Choice | None:
    """The choice in a file; None if there is none, or the file is damaged.

    Args:
        settings: those among which it was made.
    """
    try:
        found = Choice(**read_object(path))
        is_sound = isinstance(found.summary, str) and min(found.step_s, found.cost_s) > 0
        if found.options is not None:
            are_known = {name: found.options[name] in values for name, values in settings.items()}
            is_sound = is_sound and are_known == dict.fromkeys(found.options, True)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return found if is_sound else None


def write(path: Path, choice: Choice) -> None:
    """Keeps a choice; a folder that cannot be written is no error, but costs the next run the same time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(dataclasses.asdict(choice)))


def _structure(model: keras.Model) -> list[Any]:
    """The layers of a model with their configurations, as far as these are known, its variables and its optimizers."""
    try:
        layers = model.get_config()
    except Exception:  # A model or a layer of the user's that has none.
        layers = {}
    variables = [(each.path, tuple(each.shape), str(each.dtype)) for each in model.variables]
    return [type(model).__qualname__, layers, variables, [type(each).__name__ for each in optimizers_of(model)]]
