"""NVIDIA GPUs of this machine, as the kernel shows them, and the CUDA libraries that TensorFlow opens for them."""

import contextlib
import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
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
_NVIDIA = "0x10de"
_DISPLAY_CONTROLLERS = "0x03"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The NVIDIA GPUs of a machine."""

    names: tuple[str, ...]
    """By the driver; without one, the PCI addresses."""
    has_driver: bool


def hardware(root: Path = Path("/")) -> Hardware:
    """The NVIDIA GPUs below ``/proc`` and ``/sys``; in a container, those that it was given."""
    driver = root / "proc/driver/nvidia/gpus"
    if driver.is_dir():
        return Hardware(tuple(_model(each) for each in sorted(driver.iterdir())), has_driver=True)
    with contextlib.suppress(OSError):
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
        return Hardware(tuple(each.name for each in devices if _is_nvidia_gpu(each)), has_driver=False)
    return Hardware((), has_driver=False)


def _model(folder: Path) -> str:
    with contextlib.suppress(OSError):
        for line in (folder / "information").read_text().splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return folder.name


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY_CONTROLLERS)


def package_folders() -> list[str]:
    """Where the packages of NVIDIA are installed, if they are: TensorFlow opens libraries there by itself."""
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec is not None else []


def missing_libraries(folders: Sequence[str], load: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Those of :data:`LIBRARIES` that are neither in these folders of packages nor found by the system."""
    missing = []
    for name in LIBRARIES:
        if any(True for folder in folders for _ in Path(folder).glob(f"*/lib/{name}")):
            continue
        try:
            load(name)
        except OSError:
            missing.append(name)
    return missing
