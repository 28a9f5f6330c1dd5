"""A configuration from what was given: flags and a TOML file."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.options import converted
from hvdtrain.config.train import TrainConfig
from hvdtrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _read_toml(path: str, kind: type[TrainConfig]) -> dict[str, Any]:
    """The keys of a TOML file, named as the flags are (``batch-size`` or ``batch_size``).

    Raises:
        UsageError: the file cannot be read, is not TOML, or holds an unknown key or a wrong value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config must name a readable TOML file. Received: {path!r} ({error})") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config must be TOML. Received: {path!r}: {error}") from error
    try:
        return {key.replace("-", "_"): converted(key.replace("-", "_"), value, kind) for key, value in table.items()}
    except UsageError as error:
        raise UsageError(f"in {path}: {error}") from None


def build(flags: Mapping[str, Any], config_file: str | None, kind: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """A configuration of training from a TOML file and flags; flags win.

    Raises:
        UsageError: a value breaks its rule.
    """
    values = _read_toml(config_file, kind) if config_file is not None else {}
    for name, value in flags.items():
        values[name] = converted(name, value, kind)
    return kind(**values, given=frozenset(values))
