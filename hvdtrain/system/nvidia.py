"""The NVIDIA GPUs of this machine, as the kernel shows them."""

import contextlib
import dataclasses
from pathlib import Path

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
