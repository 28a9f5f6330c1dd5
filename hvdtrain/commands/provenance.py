"""What a run is made with, for comparisons of runs: versions, hosts, the user's code, and the data."""

import collections
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.fault_tolerance.user_code import is_of_the_user
from hvdtrain.system import versions

_MAX_NAMES = 200
"""The most hosts, and the most files of code, that are listed."""


def provenance(hosts: Sequence[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``provenance.json``.

    Args:
        hosts: the host of each rank.
        data: the facts of the training data.
    """
    ranks_of_hosts = collections.Counter(hosts)
    return {
        "versions": versions.versions(),
        "ranks per host": dict(list(ranks_of_hosts.items())[:_MAX_NAMES]),
        "code": {"hvdtrain": versions.code_digest(), **_imported_code()},
        "training data": dict(data),
    }


def _imported_code() -> dict[str, str]:
    """A digest of each source file of the user's that has been imported, by its name below the program's folder."""
    folder = Path.cwd()
    found = {}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file in sorted(each for each in files if each is not None and each.endswith(".py") and is_of_the_user(each)):
        path = Path(file).absolute()
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        except OSError:
            continue  # Deleted, or within an archive.
    return dict(list(found.items())[:_MAX_NAMES])
