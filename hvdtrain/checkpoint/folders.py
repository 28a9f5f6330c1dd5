"""Where checkpoints are kept: a folder of this host, or an object store with a local copy.

An object store has no renames. A checkpoint there is complete if it has ``SHA256SUMS``, which is uploaded last and
deleted first; a single file is uploaded completely or not at all.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import storage
from hvdtrain.checkpoint.config import CHECKPOINTS
from hvdtrain.checkpoint.storage import SUMS, folder_name, is_checkpoint, step_of
from hvdtrain.config.wording import option
from hvdtrain.errors import DataError, StoreError
from hvdtrain.stores.local_copies import reading_folder, set_aside
from hvdtrain.stores.store import Stat, Store
from hvdtrain.stores.urls import is_url, join, local_path
from hvdtrain.system import network
from hvdtrain.system.atomic_files import commit, remove, replaced_on_success
from hvdtrain.system.bounded_files import read_bytes
from hvdtrain.system.json_files import object_in
from hvdtrain.system.terminal import report

WRITER = "writer.json"
"""The file in a store that names the job writing there: the last one that started."""

_MAX_READS = 3


class LocalFolder:
    """A folder of this host. Only rank 0 calls the methods, as with :class:`StoredFolder`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.name = str(directory)

    def fetch(self) -> bool:
        """Downloads what is needed to resume; returns whether the local folder has checkpoints that the store lacks."""
        return True

    def claim(self) -> None:
        """Registers this job as the writer of this folder."""

    def publish(self, step: int, keep: int) -> None:
        """Uploads a checkpoint, and deletes all but the latest ones from the store."""

    def set_aside_later(self, step: int) -> None:
        """Renames the checkpoints of later steps."""
        storage.set_aside_later(self.directory, step)

    def newest_step(self) -> int | None:
        """The step of the latest checkpoint, intact or damaged; None if there is none."""
        found = storage.checkpoints_in(self.directory)
        return step_of(found[-1]) if found else None

    def reading(self) -> AbstractContextManager[Path]:
        """A folder with the latest intact checkpoint; read-only."""
        return nullcontext(self.directory)

    def named(self, path: str | Path) -> AbstractContextManager[Path]:
        """The local path of a checkpoint, a folder of checkpoints, or a run."""
        return local_copy(path)


class StoredFolder(LocalFolder):
    """A folder of an object store. Checkpoints are written to a local folder and uploaded when complete.

    Args:
        url: the folder.
        directory: the local folder (default: the one of this URL in the cache).
    """

    def __init__(self, url: str, directory: Path | None = None):
        super().__init__(directory or local_path("runs", url))
        self._store = Store(url)
        self.name = self._store.url
        # Names the latest checkpoint that both had, even if the local one has been deleted since.
        self._note = self.directory.with_name(f".{self.directory.name}.stored")
        self._token: str | None = None

    def fetch(self) -> bool:
        """See :meth:`LocalFolder.fetch`. A damaged checkpoint is reported and the one before it is fetched.

        The store decides which run this is: if its latest checkpoint was neither uploaded from nor downloaded to the
        local folder, that folder belongs to another run, or to another state of this one, and is moved aside.

        Raises:
            DataError: all checkpoints in the store are damaged.
            OSError: the store cannot be read, or the local folder not written.
        """
        storage.recover(self.directory)
        own, complete = storage.checkpoints_in(self.directory), _complete(self._listed())
        if not complete:
            if own and self._store.read(WRITER) is None:
                self._replace_local(f"{self.name} holds no checkpoint")
                own = []
            return bool(own)
        later = [each for each in own if step_of(each) > step_of(Path(complete[-1]))]
        is_continued = self._is_noted(complete[-1]) or self._is_here(complete[-1])
        if is_continued and any(storage.damage(each) is None for each in later):
            return True
        for name in reversed(complete):
            if self._is_here(name):
                return False
            fetched = self._fetched(name)
            if fetched is not None:
                if own and not is_continued:
                    self._replace_local(f"{self.name} has another latest checkpoint, {complete[-1]}")
                self._put_in_place(fetched)
                return False
        raise DataError(
            f"there must be an intact checkpoint in {self.name}. Received: {len(complete)}, all damaged. Nothing was "
            "deleted. Restore one from a backup, or train from scratch with another "
            f"{option('run_dir', argument='folder')}."
        )

    def claim(self) -> None:
        self._token = uuid.uuid4().hex
        owner = {"token": self._token, "host": network.host_name(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._store.write(WRITER, (json.dumps(owner) + "\n").encode())

    def publish(self, step: int, keep: int) -> None:
        """See :meth:`LocalFolder.publish`.

        Raises:
            OSError: the store cannot be written, or another job has begun to write there. Complete checkpoints in the
                store stay complete, except one of this step.
        """
        self._require_ownership()
        listed = self._listed()
        self._set_aside_later(listed, step)
        name = folder_name(step)
        self._upload(name, listed.pop(name, {}))
        self._write_note(name)
        kept = [*_complete(listed), name][-keep:]
        for other in listed:
            if other not in kept:
                self._delete(other, listed[other])

    def set_aside_later(self, step: int) -> None:
        super().set_aside_later(step)
        self._set_aside_later(self._listed(), step)

    def newest_step(self) -> int | None:
        complete = _complete(self._listed())
        return step_of(Path(complete[-1])) if complete else None

    @contextmanager
    def reading(self) -> Iterator[Path]:
        with reading_folder() as folder:
            copy = StoredFolder(self.name, folder / CHECKPOINTS)
            for _ in range(_MAX_READS):
                newest = copy.newest_step()
                try:
                    copy.fetch()
                    break
                except (DataError, OSError):
                    if copy.newest_step() == newest:
                        raise  # Otherwise its job has deleted what was being read, after writing a later one.
            yield copy.directory

    @contextmanager
    def named(self, path: str | Path) -> Iterator[Path]:
        url = str(path).rstrip("/")
        parent, _, last = url.rpartition("/")
        if url in (self.name, self.name.removesuffix(f"/{CHECKPOINTS}")):
            yield self.directory
        elif parent == self.name:
            self.fetch_one(last)
            yield self.directory / last
        else:
            with local_copy(path) as found:
                yield found

    def fetch_one(self, name: str) -> None:
        """Downloads one checkpoint, unless the local folder has it.

        Raises:
            DataError: there is none, or it is damaged.
        """
        if name not in _complete(self._listed()):
            raise DataError(f"there must be a checkpoint. Received: none in {join(self.name, name)}")
        if not self._is_here(name):
            fetched = self._fetched(name)
            if fetched is None:
                raise DataError(f"a checkpoint must be intact. Received: {join(self.name, name)}, which is damaged.")
            self._put_in_place(fetched)

    def _listed(self) -> dict[str, dict[str, Stat]]:
        """The files of each checkpoint, complete or not, in order of steps."""
        found: dict[str, dict[str, Stat]] = {}
        for path, stat in self._store.files().items():
            name, _, file = path.partition("/")
            if is_checkpoint(name) and file:
                found.setdefault(name, {})[file] = stat
        return dict(sorted(found.items(), key=lambda each: step_of(Path(each[0]))))

    def _is_here(self, name: str) -> bool:
        """Whether the local folder holds the same checkpoint, intact."""
        folder = self.directory / name
        try:
            own = read_bytes(folder / SUMS)
        except OSError:
            return False
        return own == self._store.read(f"{name}/{SUMS}") and storage.damage(folder) is None

    def _is_noted(self, name: str) -> bool:
        """Whether a checkpoint in the store is the last one that was uploaded from here or downloaded to here."""
        try:
            return read_bytes(self._note) == self._note_of(name, self._store.read(f"{name}/{SUMS}") or b"")
        except OSError:
            return False

    @staticmethod
    def _note_of(name: str, sums: bytes) -> bytes:
        return name.encode() + b"\n" + sums

    def _write_note(self, name: str) -> None:
        with replaced_on_success(self._note) as aside:
            aside.write_bytes(self._note_of(name, read_bytes(self.directory / name / SUMS)))

    def _fetched(self, name: str) -> Path | None:
        """Downloads a checkpoint to a temporary folder; None, with a report, if it is damaged."""
        folder = self.directory.with_name(f".writing-{self.directory.name}") / name
        remove(folder.parent)
        for file in self._store.files(name):
            self._store.download(file, folder / file.removeprefix(f"{name}/"))
        if problem := storage.damage(folder):
            report(0, f"{join(self.name, name)} is damaged: {problem}")
            remove(folder.parent)
            return None
        return folder

    def _put_in_place(self, fetched: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove(self.directory / fetched.name)
        commit(fetched, self.directory / fetched.name)
        remove(fetched.parent)
        self._write_note(fetched.name)

    def _replace_local(self, why: str) -> None:
        moved_to = set_aside(self.directory)
        report(0, f"{why}: moved the local copy in {self.directory} to {moved_to.name}")

    def _require_ownership(self) -> None:
        found = None if self._token is None else object_in(self._store.read(WRITER) or b"")
        if found is None:
            self.claim()
        elif found.get("token") != self._token:
            raise StoreError(
                f"another job has been writing to {self.name} since {found.get('since')}, on host {found.get('host')}; "
                f"use another {option('run_dir', argument='folder')} for one of them"
            )

    def _upload(self, name: str, present: Mapping[str, Stat]) -> None:
        folder = self.directory / name
        sizes = {file: (folder / file).stat().st_size for file in storage.listed_files(folder)}
        is_there = all(file in present and present[file].size == size for file, size in sizes.items())
        if is_there and self._store.read(f"{name}/{SUMS}") == read_bytes(folder / SUMS):
            return
        self._delete(name, present)
        for file in sizes:
            self._store.upload(folder / file, f"{name}/{file}")
        arrived = self._store.files(name)
        for file, size in sizes.items():
            stat = arrived.get(f"{name}/{file}")
            if stat is None or stat.size != size:
                raise StoreError(f"{join(self.name, name, file)} must have {size} bytes. Received: {stat}")
        self._store.upload(folder / SUMS, f"{name}/{SUMS}")

    def _delete(self, name: str, files: Mapping[str, Stat]) -> None:
        for file in sorted(files, key=lambda each: each != SUMS):
            self._store.delete(f"{name}/{file}")

    def _set_aside_later(self, listed: dict[str, dict[str, Stat]], step: int) -> None:
        """Copies later checkpoints to other names and deletes them, also from the list."""
        later = [name for name in listed if step_of(Path(name)) > step]
        taken = {path.partition("/")[0] for path in self._store.files()} if later else set()
        for name in later:
            files, number = listed.pop(name), 1
            while (target := f"{name}.aside{number}") in taken:
                number += 1
            for file in sorted(files, key=lambda each: each == SUMS):
                self._store.copy(f"{name}/{file}", f"{target}/{file}")
            self._delete(name, files)
            report(0, f"renamed the checkpoint {join(self.name, name)} to {target}")


def open_folder(directory: str | Path) -> LocalFolder:
    """The folder of checkpoints at a path or URL. Raises what :class:`~hvdtrain.stores.store.Store` raises."""
    return StoredFolder(str(directory)) if is_url(directory) else LocalFolder(Path(directory))


def newest_manifest(directory: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the manifest's path and content of the latest intact checkpoint in a folder; None if there is none."""
    with open_folder(directory).reading() as place:
        for folder in reversed(storage.checkpoints_in(place)):
            if storage.damage(folder) is None:
                with suppress(storage.MalformedError):
                    return folder / storage.MANIFEST, storage.read_manifest(folder)
    return None


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """The local path of a checkpoint, a folder of checkpoints, or a run; of a downloaded copy if it is a URL."""
    if not is_url(path):
        yield Path(path)
        return
    url = str(path).rstrip("/")
    parent, _, last = url.rpartition("/")
    with reading_folder() as folder:
        if is_checkpoint(last):
            StoredFolder(parent, folder / CHECKPOINTS).fetch_one(last)
            yield folder / CHECKPOINTS / last
            return
        for place in (url, join(url, CHECKPOINTS)):
            stored = StoredFolder(place, folder / CHECKPOINTS)
            if stored.newest_step() is not None:
                stored.fetch()
                break
        yield folder / CHECKPOINTS


def _complete(listed: Mapping[str, Mapping[str, Stat]]) -> list[str]:
    return [name for name, files in listed.items() if SUMS in files]
