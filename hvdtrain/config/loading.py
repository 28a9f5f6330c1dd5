"""Reads a configuration from command-line flags and a TOML file; flags win."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import Token
from cyclopts.argument import Argument, ArgumentCollection

from hvdtrain.config.fields import require_type, shown
from hvdtrain.config.unknown_options import hint_for
from hvdtrain.config.wording import flag_of
from hvdtrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 1 << 20


def read_options(arguments: ArgumentCollection) -> frozenset[str]:
    """Adds the options of the file named by ``--config``, and checks that every value has the type of its option.

    Returns:
        The options that were set explicitly, by their flat names.

    Raises:
        UsageError: the file cannot be read or is not TOML, an option is unknown, or a value has another type.
    """
    options = {each.keys[-1]: each for each in arguments if each.keys and not each.children and each.parse}
    for name, argument in options.items():
        for token in argument.tokens:
            if not isinstance(token.implicit_value, bool):  # the value of --overlap, which has no text
                require_type(name, argument.hint, token.value, is_text=True)
    file = next((each for each in arguments if each.name == "--config" and each.has_tokens), None)
    if file is not None:
        _add_file(file.tokens[0].value, options)
    return frozenset(name for name, argument in options.items() if argument.has_tokens)


def read_toml(path: str) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UsageError: it cannot be read or is not TOML.
    """
    # Not a device or a FIFO, which may have no end, or no writer.
    if not os.path.isfile(path) or os.path.getsize(path) > _MAX_BYTES:
        raise UsageError(
            f"--config must name a readable TOML file of at most {_MAX_BYTES} bytes. Received: {shown(path)}"
        )
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config must name a readable TOML file. Received: {shown(path)} ({error})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config must be TOML. Received: {shown(path)}: {shown(str(error))}") from error


def _add_file(path: str, options: Mapping[str, Argument]) -> None:
    """Keys are written as flags are, at the top level or in the table of the option's group: ``[local_sgd]``."""
    content = read_toml(path)
    names: set[str] = set()
    try:
        for key, value in content.items():
            is_table = isinstance(value, dict)
            for inner, each in value.items() if is_table else [(key, value)]:
                name = inner.replace("-", "_")
                if name in names:
                    raise UsageError(f"each option must be set once. Received: {shown(name)} twice")
                names.add(name)
                _add(inner, each, options, path, table=key.replace("-", "_") if is_table else None)
    except UsageError as error:
        raise UsageError(f"in {path}: {error}") from None


def _add(key: str, value: Any, options: Mapping[str, Argument], path: str, table: str | None = None) -> None:
    name = key.replace("-", "_")
    if name not in options or (table is not None and options[name].keys[-2:-1] != (table,)):
        where = "" if table is None else f" in table [{table:.60}]"
        hint = hint_for(name, options) if name not in options else ""
        raise UsageError(f"unknown key {shown(key)}{where}.{hint} Known keys: {', '.join(sorted(options))}")
    argument = options[name]
    require_type(name, argument.hint, value)
    if not argument.has_tokens:
        given = {"implicit_value": value} if isinstance(value, bool) else {"value": str(value)}
        argument.append(Token(keyword=flag_of(name), source=path, **given))
