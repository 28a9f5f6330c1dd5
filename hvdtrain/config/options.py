"""What an option is: a field of a configuration, with the line that documents it and the flag that sets it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from hvdtrain.errors import UsageError

WHAT, LEARNING, RANKS, RUNNING = "what to train", "learning", "between ranks", "running"
LOCAL = "between ranks, with --mode local"
MEASURING = "measuring"
PREDICTING = "predicting, with --predict"


def option(group: str, default: Any, text: str, *, metavar: str = "N", choices: tuple[str, ...] | None = None) -> Any:
    """A field with the line that documents it in ``--help``; where the default is None, the line tells what follows."""
    metadata = {"group": group, "help": text, "metavar": metavar, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


class Config:
    """What a command can be told."""

    stall_timeout: float

    def as_dict(self) -> dict[str, Any]:
        """The values by field name, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in options(self)}


def options(config: Any) -> list["dataclasses.Field[Any]"]:
    """The fields of a configuration, or of its class, that a flag sets."""
    hidden: frozenset[str] = getattr(config, "NOT_OFFERED", frozenset())
    return [field for field in dataclasses.fields(config) if "help" in field.metadata and field.name not in hidden]


def flag_of(name: str) -> str:
    """``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def broken(name: str, rule: str, received: object) -> UsageError:
    """The error of a value that breaks the rule of its option."""
    return UsageError(f"{flag_of(name)} must be {rule}. Received: {received!r}")


def require(config: Config, name: str, holds: Callable[[Any], bool], rule: str) -> None:
    """Raises UsageError where a value is there and breaks its rule."""
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise broken(name, rule, value)


def converted(name: str, value: Any, kind_of_config: type[Config]) -> Any:
    """A value from the command line or a TOML file as the type of its field.

    Raises:
        UsageError: the field does not exist or the value is not of its type.
    """
    kinds = {field.name: str(field.type) for field in options(kind_of_config)}
    if name not in kinds:
        raise UsageError(f"unknown key {name!r}. Known keys: {', '.join(sorted(kinds))}")
    kind = kinds[name]
    try:
        if "bool" in kind:
            if isinstance(value, bool):
                return value
            raise ValueError
        if isinstance(value, bool):
            raise ValueError
        if "int" in kind:
            if isinstance(value, float):
                raise ValueError
            return int(value)
        if "float" in kind:
            return float(value)
        if not isinstance(value, str):
            raise ValueError
        return value
    except ValueError:
        words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
        rule = next(text for word, text in words.items() if word in kind)
        raise broken(name, rule, value) from None
