"""Data files in object stores: downloaded once per host to a cache folder, and validated when a job starts."""

import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.data.cache import cache_file
from hvdtrain.errors import DataError, StoreError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.stores.store import Stat, Store
from hvdtrain.stores.urls import is_url, join, local_path, parts_of
from hvdtrain.system import environment, network
from hvdtrain.system.atomic_files import remove, replaced_on_success

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives

_DATA, _VERSIONS, _PARTIAL = "data", "versions", "partial"
_CONNECTIONS = 8


def fetch(url: str | Path) -> Path:
    """Downloads a file or a folder of an object store, once per host, and returns the path of the local copy.

    Collective: all ranks must call it, after ``hvdtrain.init()``. Files that were downloaded before are not downloaded
    again unless their size, etag or modification time in the store has changed. A path that is not a URL is returned
    unchanged.

    Raises:
        JobError: on every rank, if one cannot download it, or it does not exist.
    """
    from hvdtrain.distributed import runtime  # imports TensorFlow

    return Path(local_copies([url], runtime.collectives())[0])


def require_local(what: str, path: object) -> None:
    """Raises UsageError if a path is a URL, which this source does not download."""
    if is_url(path):
        raise UsageError(f"{what} must be local. Received: {path!r:.200}. Use hvdtrain.data.fetch({path!r:.200}).")


def local_copies(paths: Sequence[str | Path], collectives: "Collectives") -> list[str | Path]:
    """Replaces URLs of files, folders and glob patterns by the paths of their local copies. Collective.

    One rank of each host downloads while the others wait.

    Raises:
        JobError: on every rank, if one cannot download a file, or there is none.
    """

    def download() -> None:
        for path in paths:
            if is_url(path) and collectives.local_rank == 0:
                _download(str(path))

    # Also where no path is a URL: other ranks may have one.
    on_every_rank(download, collectives)
    return on_every_rank(lambda: [_downloaded(str(each)) if is_url(each) else each for each in paths], collectives)


def cache_folder_of(path: str | Path) -> Path:
    """The cache folder for what is derived from a data file: beside the local copies if it was downloaded."""
    stores = environment.store_cache_dir()
    return stores if Path(path).absolute().is_relative_to(stores.absolute()) else environment.cache_dir()


def _download(url: str) -> None:
    """Synchronizes the local copy of a URL with the store: downloads what differs, deletes what is gone."""
    place, names = _found(url)
    if not names:
        raise DataError(f"there must be data. Received: {url}, which is neither a file nor a folder with files")
    target = local_path(_DATA, place)
    try:
        for gone in _own(url, target) - {target / name for name in names}:
            remove(gone)
        store = Store(place)
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            # The first error ends the loop; what has not begun by then is not downloaded.
            waiting = [pool.submit(_download_file, store, name, stat) for name, stat in names.items()]
            try:
                for each in waiting:
                    each.result()
            finally:
                pool.shutdown(cancel_futures=True)
    except OSError as error:
        raise DataError(
            f"data must be readable, and the cache folder must have enough space. Received: {url} into {target} "
            f"({error}). HVDTRAIN_STORE_CACHE=/path sets another folder."
        ) from error


def _found(url: str) -> tuple[str, Mapping[str, Stat]]:
    """The URL of a folder, and the files in it that a URL matches."""
    parts_of(url)
    parent, _, name = url.rstrip("/").rpartition("/")
    files = Store(url).files()
    if "" in files:
        return parent, {name: files[""]}
    if files or not glob.has_magic(url):
        return url.rstrip("/"), files
    fixed, pattern = _split_pattern(url)
    return fixed, Store(fixed).matching(pattern)


def _split_pattern(url: str) -> tuple[str, str]:
    """Splits a pattern into its folder and the pattern inside it."""
    scheme, _, rest = url.partition("://")
    parts = rest.strip("/").split("/")
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    return f"{scheme}://{'/'.join(fixed)}", "/".join(parts[len(fixed) :])


def _own(url: str, target: Path) -> set[Path]:
    """The local files that a URL matches, some of which may no longer be in the store."""
    if glob.has_magic(url) and not local_path(_DATA, url).exists():
        return {each for each in target.glob(_split_pattern(url)[1]) if each.is_file()}
    if local_path(_DATA, url) != target:
        return set()
    return {each for each in target.rglob("*") if each.is_file()}


def _download_file(store: Store, name: str, stat: Stat) -> None:
    url = join(store.url, name)
    path, note = local_path(_DATA, url), local_path(_VERSIONS, url)
    version = f"{stat.size} {stat.version}"
    with suppress(OSError):
        if path.stat().st_size == stat.size and note.read_text() == version:
            return
    remove(note)
    # Not in the folder itself, where a task would find it; and not by a name that another process uses.
    partial = local_path(_PARTIAL, url)
    partial = partial.with_name(f"{partial.name}.{network.host_name()}-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_on_success(path, partial):
        store.download(name, partial)
        if (size := partial.stat().st_size) != stat.size:
            raise StoreError(f"{url} must have {stat.size} bytes. Received: {size}; is it being written?")
    with cache_file(note) as file:
        file.write(version.encode())


def _downloaded(url: str) -> str | Path:
    """The local path or pattern of a URL that this rank, or another on its host, has downloaded."""
    path = local_path(_DATA, url)
    if path.exists():
        return path
    if glob.has_magic(url):
        fixed, pattern = _split_pattern(url)
        return f"{glob.escape(str(local_path(_DATA, fixed)))}/{pattern}"
    raise DataError(
        f"the ranks of a host must use the same data and the same file system. Received: {url}, which is not in {path}"
    )
