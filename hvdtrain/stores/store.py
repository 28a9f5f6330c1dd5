"""The files below one URL of an object store."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import StoreError
from hvdtrain.stores.urls import join, parts_of, require_usable
from hvdtrain.system import transfers
from hvdtrain.system.bounded_files import MAX_BYTES

# What the file systems of fsspec call it: S3, Google, Azure, then times.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")


class Stat(NamedTuple):
    """What a store says about a file."""

    size: int
    version: str
    """Changes with the content: an etag, or the time of the last change."""


class Store:
    """A folder in an object store. Each method makes one request or two, or one for each file.

    Stores have neither renames nor folders that appear at once. What hvdtrain relies on is that a single file appears
    completely or not at all, which S3, Google and Azure guarantee. All methods raise StoreError, an OSError.

    Raises:
        UsageError: the URL names no place, or a package is missing.
    """

    def __init__(self, url: str):
        require_usable("a URL", url)
        protocol, _ = parts_of(url)
        self.url = url.rstrip("/")
        import fsspec

        # A listing must show what other hosts have written.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        with self._as_store_error():
            self._fs: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
            self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def files(self, below: str = "") -> dict[str, Stat]:
        """All files below a folder by their names in this store; one file if the URL is that of a file.

        Raises:
            StoreError: the store cannot be read, or a name cannot be that of a local file.
        """
        with self._as_store_error():
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(below), detail=True)
        return self._stats(found)

    def matching(self, pattern: str) -> dict[str, Stat]:
        """The files whose names match a glob pattern; raises what :meth:`files` raises."""
        with self._as_store_error():
            self._fs.invalidate_cache()
            found = self._fs.glob(self._path(pattern), detail=True)
        return self._stats({path: each for path, each in found.items() if each["type"] == "file"})

    def read(self, name: str) -> bytes | None:
        """The content of a file of at most ``bounded_files.MAX_BYTES``; None if there is none."""
        with self._as_store_error():
            try:
                # Not a range of it: an empty file has none.
                if self._fs.size(self._path(name)) <= MAX_BYTES:
                    return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None
        raise StoreError(f"{join(self.url, name)} must have at most {MAX_BYTES >> 20} MiB")

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        with self._as_store_error():
            self._fs.pipe_file(self._path(name), content)

    def upload(self, path: Path, name: str) -> None:
        """Copies a local file to the store."""
        with self._as_store_error():
            self._fs.put_file(str(path), self._path(name), callback=_noting_transfers())

    def download(self, name: str, path: Path) -> None:
        """Copies a file to a local path, whose folder is created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._as_store_error():
            self._fs.get_file(self._path(name), str(path), callback=_noting_transfers())

    def copy(self, name: str, other: str) -> None:
        """Copies a file within the store."""
        with self._as_store_error():
            self._fs.cp_file(self._path(name), self._path(other))

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""
        with self._as_store_error(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        # Without a name: the URL is that of a file.
        return f"{self._root}/{name}" if name else self._root

    def _stats(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Stat]:
        files = {}
        for path, info in found.items():
            name = path.removeprefix(self._root).removeprefix("/")
            if name.endswith("/"):
                continue  # a console's sign of a folder
            # Names become local paths: none may lead out of the folder, or to another name's file.
            if name and any(part in ("", ".", "..") for part in name.split("/")):
                raise StoreError(f"{join(self.url, name)} cannot be the name of a local file")
            version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
            files[name] = Stat(int(info["size"] or 0), version)
        return files

    @contextlib.contextmanager
    def _as_store_error(self) -> Iterator[None]:
        """Errors of a store's own library become StoreError, with the URL, in one line."""
        try:
            yield
            transfers.note()
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            raise StoreError(f"{self.url}: {text or type(error).__name__}") from error


def _noting_transfers() -> Any:
    """A callback of fsspec: a file that takes longer than the stall timeout is no stall while its parts move."""
    from fsspec.callbacks import Callback

    class Noting(Callback):
        def relative_update(self, inc: int = 1) -> None:
            transfers.note()

    return Noting()
