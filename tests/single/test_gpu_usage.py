"""What is logged of a GPU, with a fake TensorFlow and a fake NVML."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def gpu_usage():
    """A fresh copy of the module, which keeps what library it has found."""
    spec = importlib.util.find_spec("hvdtrain.system.gpu_usage")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeTensorFlow:
    def __init__(self, gpus):
        self.config = self
        self.experimental = self
        self._gpus = gpus

    def get_visible_devices(self, kind):
        return [SimpleNamespace(name=f"/physical_device:{kind}:{i}") for i in self._gpus]

    def get_memory_info(self, device):
        assert device == "GPU:0"  # the only one that is visible
        return {"current": 0, "peak": 3 << 20}


class FakeNvml:
    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 2:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-5a": 9}[name]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=10 * handle)


@pytest.mark.parametrize(
    ("gpus", "shown", "nvml", "expected"),
    [
        ([], None, FakeNvml(), {}),
        ([1], None, None, {"gpu_memory_mib": 3}),
        ([1], None, FakeNvml(), {"gpu_memory_mib": 3, "gpu_utilization": 0.1}),
        ([1], "0, 2", FakeNvml(), {"gpu_memory_mib": 3, "gpu_utilization": 0.2}),
        ([0], "GPU-5a", FakeNvml(), {"gpu_memory_mib": 3, "gpu_utilization": 0.9}),
        ([0], "7", FakeNvml(), {"gpu_memory_mib": 3}),
    ],
)
def test_memory_and_utilization_are_those_of_the_own_gpu(gpus, shown, nvml, expected, gpu_usage, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorFlow(gpus))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpu_usage.gpu_gauges() == pytest.approx(expected)
