"""The small files of a run in an object store, and their local copies: all but its checkpoints."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdtrain.checkpoint.config import CHECKPOINTS
from hvdtrain.checkpoint.folders import WRITER, open_folder
from hvdtrain.checkpoint.storage import checkpoints_in
from hvdtrain.errors import DataError
from hvdtrain.runs.run_files import EVALUATIONS
from hvdtrain.stores.local_copies import set_aside
from hvdtrain.stores.store import Store
from hvdtrain.stores.urls import join
from hvdtrain.system.atomic_files import is_temporary, remove, replaced_on_success
from hvdtrain.system.terminal import report

# Large, and written again at the end of a run.
_NOT_FETCHED = ("model.keras", "model.weights.h5")
_CONFIG = "config.json"
_WRITER = f"{CHECKPOINTS}/{WRITER}"
# What checkpoint.folders leaves beside the local copy of the checkpoints.
_LOCAL_ONLY = (f"{CHECKPOINTS}.aside", f".{CHECKPOINTS}.", f".writing-{CHECKPOINTS}")


class RunStore:
    """A run in an object store, for the job that writes it. Only rank 0 has one.

    Args:
        url: the URL of the run.
        path: the local copy.
        but: names of files that exist only in the local folder.
    """

    def __init__(self, url: str, path: Path, *, but: Sequence[str] = ()):
        self._store = Store(url)
        self._path = path
        self._but = but
        # Sizes and modification times of local files whose content is in the store.
        self._published: dict[str, tuple[int, int]] = {}
        # What named the job that writes there, when this one last wrote.
        self._writer: bytes | None = None

    def fetch(self) -> None:
        """Updates the local folder from the store.

        The store's files replace those in the local folder, unless it has later checkpoints, saved by a job that could
        not upload them.

        Raises:
            DataError: the store holds something else there, or only damaged checkpoints.
            OSError: the store cannot be read, or the local folder not be written.
        """
        found = self._store.files()
        if not found:
            if self._local_files() or checkpoints_in(self._path / CHECKPOINTS):
                moved_to = set_aside(self._path, but=self._but)
                report(0, f"{self._store.url} holds no run: moved the local copy in {self._path} to {moved_to.name}")
            return
        if _CONFIG not in found and not any(_is_checkpoints(name) for name in found):
            raise DataError(
                f"--run-dir must be a new folder, or that of an earlier run. Received: {self._store.url}, which holds "
                f"something else ({min(found)}). It was left untouched; use another one."
            )
        if open_folder(join(self._store.url, CHECKPOINTS)).fetch():
            return
        wanted = [name for name in self._own(found) if name not in _NOT_FETCHED]
        for name in self._local_files():
            if name not in wanted:
                remove(self._path / name)
        for name in wanted:
            path = self._path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_on_success(path) as aside:
                self._store.download(name, aside)
            self._published[name] = _state(path)

    def publish(self, *, last: str) -> None:
        """Uploads the files that have changed.

        Args:
            last: the file to upload last, which marks the others as complete.

        Raises:
            OSError: the store cannot be written.
        """
        for name in sorted(self._local_files(), key=lambda each: (each == last, each)):
            path = self._path / name
            try:
                state = _state(path)
                if self._published.get(name) == state:
                    continue
                self._store.upload(path, name)
            except OSError:
                if not path.exists():
                    continue  # A logger has deleted its own file.
                raise
            self._published[name] = state
        self._writer = self._store.read(_WRITER)

    def is_ours(self) -> bool:
        """Whether no other job has begun to write there since :meth:`publish`; raises OSError if it cannot be read."""
        return self._store.read(_WRITER) == self._writer

    def delete(self, name: str) -> None:
        """Deletes a file from the store; raises OSError if the store cannot be written."""
        self._store.delete(name)
        self._published.pop(name, None)

    def _local_files(self) -> list[str]:
        paths = self._path.rglob("*") if self._path.is_dir() else ()
        files = [each.relative_to(self._path).as_posix() for each in paths if each.is_file() and not each.is_symlink()]
        return self._own(files)

    def _own(self, names: Iterable[str]) -> list[str]:
        """The small files of this run, without those of runs in folders below it."""
        names = list(names)
        others = tuple(name.removesuffix(_CONFIG) for name in names if name.endswith(f"/{_CONFIG}"))
        return [name for name in names if self._is_small(name) and not name.startswith(others)]

    def _is_small(self, name: str) -> bool:
        # Evaluations are appended by another job.
        own = name not in self._but and name != EVALUATIONS and not is_temporary(Path(name))
        return own and not _is_checkpoints(name)


def _is_checkpoints(name: str) -> bool:
    first = name.partition("/")[0]
    return first == CHECKPOINTS or first.startswith(_LOCAL_ONLY)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
