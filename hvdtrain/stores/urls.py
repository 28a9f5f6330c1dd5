"""URLs of object stores, and where their files go on this host."""

import re
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system import environment

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# pathlib merges the slashes of Path("s3://bucket/run").
_SHORTENED = re.compile(r"(s3a?|gs|gcs|memory|abfss?|az):/[^/]")
_EXTRA = "HVDTRAIN_EXTRAS=stores launch/run …, or pip install 'hvdtrain[stores]'"


def is_url(path: object) -> bool:
    """Whether a path is the URL of an object store.

    Raises:
        UsageError: it was one before it became a ``pathlib.Path``.
    """
    if isinstance(path, Path) and _SHORTENED.match(str(path)):
        raise UsageError(f"a URL must be a string, not a pathlib.Path. Received: {path!r}. Leave out Path(…).")
    return isinstance(path, str) and _URL.fullmatch(path) is not None


def require_usable(what: str, url: str) -> None:
    """Checks that a URL is complete and that the packages for its protocol are installed; connects to nothing.

    Args:
        what: the option or argument, for the message.

    Raises:
        UsageError: the URL is incomplete, or a package is missing.
    """
    protocol, _ = parts_of(url, what)
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(
            f"{what} {protocol}://… needs packages that are not installed. Received: {error}. Install them: {_EXTRA}"
        ) from error
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise UsageError(
            f"{what} must be a path, or a URL with a protocol that fsspec knows, such as s3://. Received: {url!r:.200}"
        ) from None
    except ImportError as error:
        remedy = f"Install them: {_EXTRA}" if protocol in ("s3", "s3a") else "Install it with pip."
        raise UsageError(
            f"{what} {protocol}://… needs packages that are not installed. Received: {error}. {remedy}"
        ) from error


def parts_of(url: str, what: str = "a URL") -> tuple[str, tuple[str, ...]]:
    """The protocol of a URL, and the names that lead to its place.

    Raises:
        UsageError: it names no place, or one outside of it.
    """
    match = _URL.fullmatch(url)
    assert match is not None, url
    names = tuple(match[2].strip("/").split("/"))
    if any(each in ("", ".", "..") for each in names):
        raise UsageError(f"{what} must have the form {match[1]}://bucket/path. Received: {url!r:.200}")
    return match[1].lower(), names


def join(url: str, *names: str) -> str:
    """The path or URL of something below another."""
    return "/".join([url.rstrip("/"), *names])


def local_path(kind: str, url: str) -> Path:
    """Where the local copy of a URL is on this host.

    Args:
        kind: what it is a copy of: ``runs``, ``data``, …
    """
    protocol, names = parts_of(url)
    return environment.store_cache_dir().joinpath(kind, protocol, *names)
