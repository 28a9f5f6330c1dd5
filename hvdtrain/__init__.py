"""Trains Keras 3 models on many processes with Horovod's ring allreduce, equal to one process."""

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain import errors

if TYPE_CHECKING:
    from hvdtrain import data
    from hvdtrain.averaging import LocalTraining, ParameterAverager
    from hvdtrain.batchnorm import synchronize_batch_normalization
    from hvdtrain.checkpoint import Checkpointer
    from hvdtrain.failure import JobWatch
    from hvdtrain.optimizer import DistributedOptimizer
    from hvdtrain.replicas import broadcast
    from hvdtrain.runtime import Topology, init
    from hvdtrain.tasks import Task
    from hvdtrain.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "DistributedOptimizer",
    "JobWatch",
    "LocalTraining",
    "ParameterAverager",
    "Task",
    "Topology",
    "Trainer",
    "broadcast",
    "data",
    "errors",
    "init",
    "synchronize_batch_normalization",
]

_HOMES = {
    "Checkpointer": "checkpoint",
    "JobWatch": "failure",
    "LocalTraining": "averaging",
    "ParameterAverager": "averaging",
    "DistributedOptimizer": "optimizer",
    "Task": "tasks",
    "Topology": "runtime",
    "Trainer": "trainer",
    "broadcast": "replicas",
    "init": "runtime",
    "synchronize_batch_normalization": "batchnorm",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: TensorFlow takes seconds to import, and MPI must not start."""
    if name not in __all__:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    from hvdtrain import process

    process.import_tensorflow()
    if name not in _HOMES:
        return importlib.import_module(f"hvdtrain.{name}")
    return getattr(importlib.import_module(f"hvdtrain.{_HOMES[name]}"), name)
