"""What ``--help`` shows: the options that most runs need, or all of them with ``--help all``."""

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel, InlineText
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

_ALL = "all"
_HELP = ("--help", "-h")
# The commands of which --help shows a part, and what it shows.
_FIRST = {
    None: (),
    "train": (
        *("--task", "--data-dir", "--run-dir", "--steps", "--epochs", "--batch-size", "--optimizer"),
        *("--learning-rate", "--seed", "--mixed-precision", "--eval-every", "--checkpoint-every", "--resume"),
    ),
    "bench": (
        *("--task", "--data-dir", "--batch-size", "--mixed-precision", "--mode", "--compression", "--compressions"),
        *("--blocks", "--output"),
    ),
}


class HelpPages(DefaultFormatter):
    """Renders a page of help.

    Args:
        command: whose help it is; None: the list of commands.
        shows_all: whether it shows all options.
    """

    def __init__(self, command: str | None, *, shows_all: bool):
        super().__init__()
        self._first = None if shows_all else _FIRST.get(command)
        self._command = command

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: HelpPanel) -> None:
        """Prints one group of options or commands."""
        entries = [_on_one_line(each) for each in panel.entries if self._shows(panel, each)]
        if entries:
            shown = copy.copy(panel)
            shown.entries = entries
            super().__call__(console, options, shown)

    def _shows(self, panel: HelpPanel, entry: HelpEntry) -> bool:
        if self._first is None or panel.format == "command":
            return True
        return any(name in self._first for name in entry.positive_names)

    @property
    def epilogue(self) -> str | None:
        """How to see the rest; None if nothing is left out."""
        if self._first is None:
            return None
        if self._command is None:
            return "Options of a command: python -m hvdtrain train --help"
        return f"All options: python -m hvdtrain {self._command} --help all"


def asks_for_all(arguments: Sequence[str]) -> bool:
    """Whether arguments have ``--help all``."""
    return any(first in _HELP and second == _ALL for first, second in itertools.pairwise(arguments))


def _on_one_line(entry: HelpEntry) -> HelpEntry:
    """Without the line breaks of a docstring in the source."""
    description: Any = entry.description
    if isinstance(description, InlineText) and isinstance(description.primary_renderable, Text):
        description.primary_renderable = Text(" ".join(description.primary_renderable.plain.split()))
    return entry
