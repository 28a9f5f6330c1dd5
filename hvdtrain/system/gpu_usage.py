"""How much of its GPU this rank uses: memory as TensorFlow counts it, utilization as NVIDIA's driver does."""

import contextlib
import functools
from typing import Any

from hvdtrain.system import environment

_MIB = 2**20


def gpu_gauges() -> dict[str, float]:
    """``gpu_memory_mib``: the peak of this process; ``gpu_utilization``: of the whole device, 0 to 1, if known.

    Empty without a GPU.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return {}
    gauges = {"gpu_memory_mib": tf.config.experimental.get_memory_info("GPU:0")["peak"] / _MIB}
    # "/physical_device:GPU:1": among those that CUDA_VISIBLE_DEVICES shows.
    utilization = _utilization(int(visible[0].name.rpartition(":")[2]))
    return gauges if utilization is None else {**gauges, "gpu_utilization": utilization}


def _utilization(index: int) -> float | None:
    nvml = _nvml()
    if nvml is None:
        return None
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    name = str(index) if shown is None else shown.split(",")[index].strip()
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    return None


@functools.cache
def _nvml() -> Any | None:
    """NVIDIA's management library, started; None if it is not installed or finds no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
