"""The CUDA libraries that TensorFlow opens before it registers a GPU, from the packages of the extra ``cuda``."""

import ctypes
import importlib.util
from pathlib import Path

# What TensorFlow 2.21 opens by name; if one is missing, it registers no GPU.
LIBRARIES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcudnn.so.9",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
)
_DRIVER = "libcuda.so.1"
_CUSOLVER = "libcusolver.so.11"
# Requests of dlinfo(3).
_RTLD_DI_SERINFO, _RTLD_DI_SERINFOSIZE = 4, 5


def preload() -> None:
    """Opens the library that TensorFlow does not find, if this machine has a driver; call it before it lists devices.

    TensorFlow 2.21 opens CUDA's libraries from ``libtensorflow_framework.so.2``, whose run path has the folder of every
    package except cuSOLVER's. The dynamic loader finds a library by its name once it is loaded.
    """
    if _error_of_opening(_DRIVER) is None and _error_of_opening(_CUSOLVER) is not None:
        for path in _in_packages(_CUSOLVER):
            _error_of_opening(str(path))  # If there is one, TensorFlow finds no GPU, and doctor says why.


def errors_of_opening(opener: Path) -> dict[str, str]:
    """The names of :data:`LIBRARIES` that cannot be opened, with the dynamic loader's reasons.

    Args:
        opener: the library that opens them, which determines where they are looked for.
    """
    errors = {}
    folders = _search_path(opener)
    for name in LIBRARIES:
        paths = [path for folder in folders if (path := folder / name).exists()]
        # By name, the loader finds libraries that are loaded, and those of the system.
        reasons = [_error_of_opening(each) for each in (name, *map(str, paths))]
        if None not in reasons:
            reasons += [_error_of_opening(str(path)) for path in _in_packages(name)]
            errors[name] = [each for each in reasons if each is not None][-1]
    return errors


def _error_of_opening(library: str) -> str | None:
    """Loads a library by name or path; returns the dynamic loader's reason if it cannot."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def _in_packages(name: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))]


class _SearchPath(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("count", ctypes.c_uint))  # Dl_serinfo


class _SearchFolder(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("flags", ctypes.c_uint))  # Dl_serpath


def _search_path(opener: Path) -> list[Path]:
    """Where the dynamic loader looks for what a library opens: LD_LIBRARY_PATH, its run path, the system's folders."""
    handle = ctypes.c_void_p(ctypes.CDLL(str(opener))._handle)
    dlinfo = ctypes.CDLL("libdl.so.2").dlinfo
    found = _SearchPath()
    if dlinfo(handle, _RTLD_DI_SERINFOSIZE, ctypes.byref(found)) != 0:
        return []
    buffer = ctypes.create_string_buffer(found.size)
    ctypes.memmove(buffer, ctypes.byref(found), ctypes.sizeof(found))
    if dlinfo(handle, _RTLD_DI_SERINFO, buffer) != 0:
        return []
    folders = (_SearchFolder * found.count).from_buffer(buffer, ctypes.sizeof(_SearchPath))
    return [Path(each.name.decode()) for each in folders]
