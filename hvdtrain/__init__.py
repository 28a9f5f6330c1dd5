"""Trains Keras 3 models on many processes with Horovod's ring allreduce, equal to one process."""

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain import errors

if TYPE_CHECKING:
    from hvdtrain import callbacks, data
    from hvdtrain.checkpoint.checkpointer import Checkpointer
    from hvdtrain.checkpoint.config import CheckpointConfig
    from hvdtrain.data.sharding import shard
    from hvdtrain.distributed.replica_consistency import broadcast
    from hvdtrain.distributed.runtime import Topology, init, process_set
    from hvdtrain.fault_tolerance.job_watch import JobWatch
    from hvdtrain.local_sgd.averager import ParameterAverager
    from hvdtrain.local_sgd.config import LocalSGDConfig
    from hvdtrain.loggers.config import LoggingConfig
    from hvdtrain.optim.distributed_optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from hvdtrain.optim.gradient_tape import DistributedGradientTape
    from hvdtrain.optim.hooks import synchronize_batch_normalization
    from hvdtrain.tasks.task import Task
    from hvdtrain.training.config import GuardConfig, TrainConfig
    from hvdtrain.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GuardConfig",
    "JobWatch",
    "LocalSGDConfig",
    "LoggingConfig",
    "ParameterAverager",
    "PartialDistributedOptimizer",
    "Task",
    "Topology",
    "TrainConfig",
    "Trainer",
    "broadcast",
    "callbacks",
    "data",
    "errors",
    "init",
    "process_set",
    "shard",
    "synchronize_batch_normalization",
]

_MODULES = {
    "CheckpointConfig": "checkpoint.config",
    "Checkpointer": "checkpoint.checkpointer",
    "DistributedGradientTape": "optim.gradient_tape",
    "DistributedOptimizer": "optim.distributed_optimizer",
    "GuardConfig": "training.config",
    "JobWatch": "fault_tolerance.job_watch",
    "LocalSGDConfig": "local_sgd.config",
    "LoggingConfig": "loggers.config",
    "ParameterAverager": "local_sgd.averager",
    "PartialDistributedOptimizer": "optim.distributed_optimizer",
    "Task": "tasks.task",
    "Topology": "distributed.runtime",
    "TrainConfig": "training.config",
    "Trainer": "training.trainer",
    "broadcast": "distributed.replica_consistency",
    "init": "distributed.runtime",
    "process_set": "distributed.runtime",
    "shard": "data.sharding",
    "synchronize_batch_normalization": "optim.hooks",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: TensorFlow takes seconds to import, and MPI must not start."""
    if name not in __all__:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    from hvdtrain.system.tensorflow_start import import_tensorflow

    import_tensorflow()
    # For a program that uses Horovod's own optimizer beside hvdtrain: it is refused at its first update.
    importlib.import_module("hvdtrain.optim.hooks")
    if name not in _MODULES:
        return importlib.import_module(f"hvdtrain.{name}")
    return getattr(importlib.import_module(f"hvdtrain.{_MODULES[name]}"), name)
