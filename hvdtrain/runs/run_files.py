"""The files of a run for commands that read it: in its folder, or downloaded from an object store."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hvdtrain.checkpoint.config import CHECKPOINTS
from hvdtrain.errors import StoreError
from hvdtrain.stores.local_copies import reading_folder
from hvdtrain.stores.store import Stat, Store
from hvdtrain.stores.urls import is_url, join
from hvdtrain.system.atomic_files import remove
from hvdtrain.system.bounded_files import MAX_LINES_BYTES
from hvdtrain.system.terminal import report

RANK_TIMES = "ranks.jsonl"
"""The step times of all ranks."""
PROVENANCE = "provenance.json"
"""What the run is made with: versions, hosts, code and data."""
BENCH = "bench.json"
"""What ``bench`` writes to its folder."""
EVALUATIONS = "evaluations.jsonl"
"""What ``eval`` appends its results to."""


class RunFiles:
    """The files of a run in a folder. Only rank 0 calls the methods, as with :class:`StoredRunFiles`."""

    has_owner = True
    """Whether the file system knows the owner of the files."""

    def __init__(self, run_dir: str | Path):
        self.name = str(run_dir)
        self.checkpoints = checkpoints_of(run_dir)

    def path_of(self, name: str) -> Path:
        """The local path of a file as it is now, whether or not it exists."""
        return Path(self.name) / name

    def upload(self, name: str) -> None:
        """Uploads a file that was changed at :meth:`path_of`; prints a message on failure."""


class StoredRunFiles(RunFiles):
    """The files of a run in an object store."""

    has_owner = False

    def __init__(self, url: str, stack: ExitStack):
        super().__init__(url)
        self._store = Store(url)
        self._stack = stack
        self._folder: Path | None = None
        self._downloaded: dict[str, Stat] = {}

    def path_of(self, name: str) -> Path:
        """See :meth:`RunFiles.path_of`. Raises StoreError if the store cannot be read."""
        if self._folder is None:
            self._folder = self._stack.enter_context(reading_folder())
        path = self._folder / name
        stat = self._store.files(name).get(name)
        if stat is not None and stat.version and stat == self._downloaded.get(name):
            return path
        remove(path)
        if stat is not None:
            if stat.size > MAX_LINES_BYTES:
                raise StoreError(f"{join(self.name, name)} must have at most {MAX_LINES_BYTES >> 20} MiB")
            # Not read into memory: a log grows with its run.
            self._store.download(name, path)
            self._downloaded[name] = stat
        return path

    def upload(self, name: str) -> None:
        assert self._folder is not None
        try:
            self._store.upload(self._folder / name, name)
        except StoreError as error:
            report(0, f"{join(self.name, name)} cannot be written: {error}")


@contextmanager
def open_run_files(run_dir: str | Path) -> Iterator[RunFiles]:
    """The files of the run at a path or URL; downloads are deleted at the end.

    Raises:
        UsageError: the packages for the URL are not installed.
    """
    with ExitStack() as stack:
        yield StoredRunFiles(str(run_dir), stack) if is_url(run_dir) else RunFiles(run_dir)


def checkpoints_of(run_dir: str | Path) -> str | Path:
    """The path or URL of the checkpoints of a run."""
    return join(str(run_dir), CHECKPOINTS) if is_url(run_dir) else Path(run_dir) / CHECKPOINTS
