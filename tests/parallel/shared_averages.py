"""The averages of local SGD that the processes of an elastic job have noted: are they the same?"""

from pathlib import Path
from typing import NamedTuple


class ComparedAverages(NamedTuple):
    """What processes have noted of the averages that they received (``HVDTRAIN_TEST_AVERAGES``)."""

    shared: int
    """Averages that several processes have received."""
    differing: list[str]
    """Those that are not bit-identical in all processes."""
    repeated: int
    """Those that only a process had received which ended then: the others averaged again, without it."""


def compared_averages(folder: Path) -> ComparedAverages:
    """Compares the averages of all processes of a job."""
    digests: dict[str, dict[Path, str]] = {}
    last: dict[Path, str] = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            name, _, digest = line.rpartition(" ")
            digests.setdefault(name, {})[path] = digest
            last[path] = name
    differing, repeated = [], 0
    for name, found in digests.items():
        if len(set(found.values())) > 1:
            repeated += 1
            if len({digest for path, digest in found.items() if last[path] != name}) != 1:
                differing.append(name)
    return ComparedAverages(sum(len(found) > 1 for found in digests.values()), differing, repeated - len(differing))
