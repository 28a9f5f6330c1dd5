"""How long it takes to copy a step's batch to the GPU, and its gradients to the host."""

import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.data.pipeline import training_dataset
from hvdtrain.system import devices
from hvdtrain.training.step_runner import StepRunner

_TIMES = 20


def measure(runner: StepRunner) -> dict[str, dict[str, float]] | None:
    """Bytes and median seconds of each copy, on this rank; None without a GPU.

    Gradients stay on the GPU if NCCL reduces them.
    """
    device = devices.own_gpu()
    if device is None:
        return None
    batch = next(iter(training_dataset(runner.source, runner.plan)))
    parts = [part for part in tf.nest.flatten(batch, expand_composites=True) if part.dtype != tf.string]
    with tf.device(device):
        gradients = [tf.zeros_like(variable.value) for variable in runner.model.trainable_variables]
    return {"batch to GPU": _copy(parts, device), "gradients to host": _copy(gradients, "/CPU:0")}


def _copy(tensors: Sequence[tf.Tensor], device: str) -> dict[str, float]:
    taken_s = []
    for _ in range(_TIMES + 1):
        began_s = time.perf_counter()
        with tf.device(device):
            copies = [tf.identity(tensor) for tensor in tensors]
            # Reading an element of the last copy waits for all.
            tf.reshape(copies[-1], [-1])[:1].numpy()
        taken_s.append(time.perf_counter() - began_s)
    num_bytes = sum(tensor.dtype.size * int(tf.size(tensor)) for tensor in tensors)
    return {"bytes": num_bytes, "seconds": statistics.median(taken_s[1:])}
