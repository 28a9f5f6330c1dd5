"""The memory that this process can still use: that of the machine, within the limits of a container or a Slurm job."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

_OWN_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """How much memory processes can still use without swapping, or being killed for more than their limit."""
    return min([int(psutil.virtual_memory().available), *_available_in_groups()])


def _available_in_groups() -> Iterator[int]:
    """What the limit of each control group leaves that contains this process."""
    for folder, limit, used, cache in _groups():
        # Without a limit, there are no such files, they have no number, or one larger than any machine.
        with contextlib.suppress(OSError, ValueError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, _number(folder / limit) - _number(folder / used) + int(statistics.get(cache, 0)))


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Folders of control groups, with the names of limit, use, and the part of it that is a cache of files."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, names = _MOUNT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _MOUNT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container, the path may be that outside, and its files those of the root.
        for folder in (root, *(root.joinpath(*parts) for parts in _prefixes(path))):
            yield folder, *names


def _prefixes(path: str) -> Iterator[tuple[str, ...]]:
    parts = [part for part in path.split("/") if part]
    return (tuple(parts[:end]) for end in range(1, len(parts) + 1))


def _number(file: Path) -> int:
    return int(file.read_text())
