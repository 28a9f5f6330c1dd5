"""The loggers that ``--loggers`` names."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.config.wording import option
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.loggers.reporter import Reporter


class _Logger(NamedTuple):
    module: str
    reporter: str
    library: str | None
    """What has to be installed, also the name of the extra of hvdtrain that installs it."""


_LOGGERS = {
    "csv": _Logger("csv_file", "CsvReporter", None),
    "mlflow": _Logger("mlflow", "MLflowReporter", "mlflow"),
    "wandb": _Logger("wandb", "WandbReporter", "wandb"),
}


def logger_names(text: str | None) -> list[str]:
    """Splits the value of ``--loggers``.

    Raises:
        UsageError: a name is not known, or its library is not installed.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        logger = _LOGGERS.get(name)
        if logger is None:
            raise UsageError(f"{option('loggers')} must be a list of {', '.join(_LOGGERS)}. Received: {text!r}")
        if logger.library is not None and importlib.util.find_spec(logger.library) is None:
            raise UsageError(
                f"{option('loggers', name)} needs the package {logger.library}. Received: a Python without it. "
                f"Install it: HVDTRAIN_EXTRAS={logger.library} launch/run …, or pip install "
                f"'hvdtrain[{logger.library}]'"
            )
    return list(dict.fromkeys(names))


def make_loggers(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> "list[Reporter]":
    """The reporters with these names."""
    reporters = []
    for name in names:
        logger = _LOGGERS[name]
        kind = getattr(importlib.import_module(f"hvdtrain.loggers.{logger.module}"), logger.reporter)
        reporters.append(kind(run_dir) if logger.library is None else kind(run_dir, config))
    return reporters
