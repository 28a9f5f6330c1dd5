"""What the configuration classes share: choices that are checked, rules, and options by their flat names.

A configuration nests the configurations of the parts it is passed to. An option's name is unique among all of them, so
that it needs no prefix as a flag (``--sync-every``), in a task's defaults and in ``config.json``.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import Group

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Fact
from hvdtrain.config.wording import option
from hvdtrain.errors import UsageError

ConfigT = TypeVar("ConfigT", bound="Config")

NOT_AN_OPTION = {"is_option": False}
"""Metadata of a field that is not an option of a run."""

_MAX_SHOWN = 200
# The largest integer in TensorFlow and NumPy.
_MAX_INT = (1 << 63) - 1
# ``get_type_hints`` evaluates annotations at each call, which took most of the time of making a configuration.
_evaluated_hints: dict[type, dict[str, Any]] = {}
_TEXT_RULE = "a string that is not empty, in valid Unicode and without null characters"
_HELP_ORDER = (
    *("Task", "Run", "Training", "Measurement", "Optimizer", "Learning rate", "Gradient reduction"),
    *(
        "Local SGD (--mode local)",
        "Stragglers (--mode sync)",
        "Replay (--quorum or --wait-free)",
        "Checkpoints",
        "Logging",
        "Guards",
        "Runtime",
        "GPUs",
        "Fault tolerance",
    ),
    "Prediction (--predict)",
)


def help_group(title: str) -> Group:
    """A group of options in ``--help``."""
    return Group(title, sort_key=_HELP_ORDER.index(title))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen dataclass, each field documented by the string below it, which raises UsageError on a broken rule.

    Rules about pairs of options are in :mod:`hvdtrain.config.exclusions`.
    """

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise broken_rule(name, one_of(get_args(hint)), getattr(self, name))
        exclusions.require_compatible(facts_of(self), known=_values(self))


def require(config: Config, name: str, holds: Callable[[Any], bool], rule: str) -> None:
    """Raises UsageError if an option is set and breaks its rule."""
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise broken_rule(name, rule, value)


def broken_rule(name: str, rule: str, received: object) -> UsageError:
    """The error of an option that breaks its rule."""
    return UsageError(f"{option(name)} must be {rule}. Received: {shown(received)}")


def shown(value: object) -> str:
    """A received value for a message, shortened: it may be a file of megabytes."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, or nested too deeply
        text = f"a value of type {type(value).__name__} that is too large"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def one_of(choices: tuple[Any, ...]) -> str:
    """The rule of an option with fixed choices."""
    return "one of " + ", ".join(map(str, choices))


def did_you_mean(received: str, choices: Iterable[str]) -> str:
    """`` Did you mean NAME?`` with the closest choice; empty if none is close."""
    closest = difflib.get_close_matches(received[:_MAX_SHOWN], list(choices), n=1)
    return f" Did you mean {closest[0]}?" if closest else ""


def require_type(name: str, hint: Any, value: Any, *, is_text: bool = False) -> None:
    """Raises UsageError unless a value is one of an option's type.

    Args:
        hint: the type of the option.
        is_text: whether the value is text, as from a flag, that must be convertible without loss.
    """
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise broken_rule(name, one_of(get_args(hint)), value)
        return
    members = get_args(hint) or (hint,)
    if value is None and type(None) in members:
        return
    for kind, rule in ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "a string")):
        if kind in members:
            fits = _converts(kind, value) if is_text else _is_instance(kind, value)
            if not fits:
                raise broken_rule(name, _TEXT_RULE if kind is str and isinstance(value, str) else rule, value)
            return


def _is_instance(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, str):
        return kind is str and _is_usable(value)
    if isinstance(value, int):
        return kind in (int, float) and abs(value) <= _MAX_INT
    return isinstance(value, kind)


def _converts(kind: type, text: str) -> bool:
    if kind is str:
        return _is_usable(text)
    if kind is bool or not text.isascii() or "_" in text or len(text) > _MAX_SHOWN:
        return False
    try:
        return _is_instance(kind, kind(text))
    except ValueError:
        return False


def _is_usable(text: str) -> bool:
    """Whether a text can be a file's name or content: lone surrogates, for example, cannot be written."""
    try:
        return bool(text) and "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


def option_names(kind: type[Config]) -> list[str]:
    """The flat names of all options of a configuration class."""
    return [field.name for _, field in _fields(kind)]


def as_dict(config: Config) -> dict[str, Any]:
    """All options by their flat names, ready for JSON."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            values |= as_dict(value)
        elif field.metadata != NOT_AN_OPTION:
            values[field.name] = value
    return values


def facts_of(*configs: Config) -> dict[Fact, str]:
    """The facts that hold for the options of configurations, each with the value received."""
    values = {name: value for config in configs for name, value in _values(config).items()}
    defaults = {field.name: field.default for config in configs for _, field in _fields(type(config), every=True)}
    return exclusions.option_facts(values, defaults)


def _values(config: Config) -> dict[str, Any]:
    """The values of all fields by their flat names, including fields that are not options of a run."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= _values(value) if isinstance(value, Config) else {field.name: value}
    return values


def default_of(kind: type[Config], name: str) -> Any:
    """The default of an option."""
    return next(field.default for _, field in _fields(kind) if field.name == name)


def with_options(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """A copy with some options, named flatly, replaced.

    Raises:
        UsageError: there is no such option, or a value has another type or breaks its rule.
    """
    known = option_names(type(config))
    for name in values:
        if name not in known:
            raise UsageError(f"unknown option {name!r}. Known options: {', '.join(sorted(known))}")
    changes: dict[str, Any] = {}
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            own = option_names(type(value))
            if chosen := {name: values[name] for name in values if name in own}:
                changes[field.name] = with_options(value, chosen)
        elif field.name in values:
            require_type(field.name, hints[field.name], values[field.name])
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def _fields(kind: type[Config], *, every: bool = False) -> Iterator[tuple[type[Config], "dataclasses.Field[Any]"]]:
    """The fields of a configuration and of nested ones; with ``every``, also those that are not options of a run."""
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Config):
            yield from _fields(hint, every=every)
        elif every or field.metadata != NOT_AN_OPTION:
            yield kind, field


def _hints(kind: type[Config]) -> Mapping[str, Any]:
    """The type of each field."""
    if kind not in _evaluated_hints:
        _evaluated_hints[kind] = get_type_hints(kind)
    return _evaluated_hints[kind]
