"""Suggestions for options that do not exist: the one that was probably meant."""

import difflib
from collections.abc import Iterable

# Names in other programs.
_OTHER_NAMES = {
    "bs": "batch-size",
    "decay": "lr-decay",
    "log-interval": "log-every",
    "lr": "learning-rate",
    "lr-schedule": "lr-decay",
    "max-steps": "steps",
    "num-epochs": "epochs",
    "num-steps": "steps",
    "output-dir": "run-dir",
    "save-every": "checkpoint-every",
    "workers": "threads",
}
_OF_LAUNCHERS = ("gpus", "np", "nproc", "num-gpus", "num-proc", "num-processes", "ranks")


def hint_for(name: str, known: Iterable[str]) -> str:
    """The suggestion to append to the message about an unknown option or key; empty if no name is close.

    Args:
        name: as received: ``--lr``, ``batch_sise``.
        known: the options or keys that exist.
    """
    by_name = {_plain(each): each for each in known}
    plain = _plain(name)
    if plain in _OF_LAUNCHERS:
        return " The number of ranks is set where they are started: hvdtrain launch --np 2 python -m hvdtrain"
    closest = [_OTHER_NAMES.get(plain), *difflib.get_close_matches(plain[:200], list(by_name), n=1)]
    found = next((by_name[each] for each in closest if each in by_name), None)
    return "" if found is None else f" Did you mean {found}?"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()
