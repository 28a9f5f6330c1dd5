"""A pytest plugin that gives TensorFlow a second CPU device, which stands for this rank's only GPU.

What is not assigned to a device is computed there, XLA compiles where it would on a GPU, and tensors travel between
the two devices. Load it before hvdtrain, Keras and TensorFlow are used: ``pytest -p stand_in_gpu``, in this folder.
"""

import os
import threading
from types import SimpleNamespace

import tensorflow as tf

from hvdtrain.system import devices, environment

GPU = SimpleNamespace(name="/physical_device:GPU:0", device_type="GPU")
_HOST, _DEVICE = "/device:CPU:0", "/device:CPU:1"
_tf_device, _tf_devices = tf.device, tf.config.list_physical_devices


def device(name):
    """``tf.device``, where ``GPU`` is the second CPU device and ``CPU`` the first."""
    kind = "GPU" if name is None else str(name).upper().replace("/DEVICE:", "").strip("/").partition(":")[0]
    return _tf_device({"CPU": _HOST, "GPU": _DEVICE}.get(kind, name))


def list_physical_devices(device_type=None):
    return [*([] if device_type == "GPU" else _tf_devices(device_type)), *([GPU] if device_type != "CPU" else [])]


class Thread(threading.Thread):
    """A thread that computes on the second device, as the main thread does."""

    def run(self):
        with device("GPU"):
            super().run()


def _install() -> None:
    tf.config.set_logical_device_configuration(_tf_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.device = device
    tf.config.list_physical_devices = list_physical_devices
    for module, name in (
        (tf.config, "set_visible_devices"),
        (tf.config, "set_logical_device_configuration"),
        (tf.config.experimental, "set_memory_growth"),
    ):
        setattr(module, name, lambda *arguments: None)
    tf.config.experimental.get_memory_info = lambda name: {"peak": 0}
    threading.Thread = Thread
    devices.own_gpu = lambda: _DEVICE
    # Each rank has its own GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(environment.launcher().rank)
    device("GPU").__enter__()


_install()
