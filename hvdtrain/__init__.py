"""Trains Keras 3 models on multiple processes with Horovod's ring allreduce, with the updates of one process."""

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain import errors

if TYPE_CHECKING:
    from hvdtrain import callbacks, data, elastic, layers
    from hvdtrain.checkpoint.checkpointer import Checkpointer
    from hvdtrain.checkpoint.config import CheckpointConfig
    from hvdtrain.checkpoint.table_reader import TableReader
    from hvdtrain.data.sharding import shard
    from hvdtrain.distributed.compression import Compression
    from hvdtrain.distributed.config import GpuConfig
    from hvdtrain.distributed.half_precision import FP16
    from hvdtrain.distributed.own_values import (
        barrier,
        broadcast_object,
        gather_objects,
        is_main_process,
        print_once,
        reduce,
    )
    from hvdtrain.distributed.power_sgd import PowerSGD
    from hvdtrain.distributed.replica_consistency import broadcast
    from hvdtrain.distributed.runtime import Topology, process_set
    from hvdtrain.fault_tolerance.job_watch import JobWatch
    from hvdtrain.local_sgd.averager import ParameterAverager
    from hvdtrain.local_sgd.config import LocalSGDConfig
    from hvdtrain.loggers.config import LoggingConfig
    from hvdtrain.loggers.console import ConsoleReporter
    from hvdtrain.loggers.csv_file import CsvReporter
    from hvdtrain.loggers.json_lines import JsonLinesReporter
    from hvdtrain.loggers.mlflow import MLflowReporter
    from hvdtrain.loggers.rank_times import RankTimesReporter
    from hvdtrain.loggers.reporter import CompositeReporter, Reporter
    from hvdtrain.loggers.tensorboard import TensorBoardReporter
    from hvdtrain.loggers.wandb import WandbReporter
    from hvdtrain.optim.distributed_optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from hvdtrain.optim.gathering import average, gather
    from hvdtrain.optim.gradient_tape import DistributedGradientTape
    from hvdtrain.optim.keras_calls import synchronize_batch_normalization
    from hvdtrain.optim.whole_batch import WholeBatch
    from hvdtrain.runs.report.notebook import report
    from hvdtrain.system.function_job import run
    from hvdtrain.tasks.task import Task
    from hvdtrain.training.config import BalanceConfig, GuardConfig, QuorumConfig, RecordConfig, TrainConfig
    from hvdtrain.training.equality.verify import verify
    from hvdtrain.training.evaluation import evaluate
    from hvdtrain.training.own_program import init
    from hvdtrain.training.own_tuning import autotune
    from hvdtrain.training.prediction import predict
    from hvdtrain.training.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "FP16",
    "BalanceConfig",
    "CheckpointConfig",
    "Checkpointer",
    "CompositeReporter",
    "Compression",
    "ConsoleReporter",
    "CsvReporter",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GpuConfig",
    "GuardConfig",
    "JobWatch",
    "JsonLinesReporter",
    "LocalSGDConfig",
    "LoggingConfig",
    "MLflowReporter",
    "ParameterAverager",
    "PartialDistributedOptimizer",
    "PowerSGD",
    "QuorumConfig",
    "RankTimesReporter",
    "RecordConfig",
    "Reporter",
    "TableReader",
    "Task",
    "TensorBoardReporter",
    "Topology",
    "TrainConfig",
    "Trainer",
    "WandbReporter",
    "WholeBatch",
    "autotune",
    "average",
    "barrier",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "data",
    "elastic",
    "errors",
    "evaluate",
    "gather",
    "gather_objects",
    "init",
    "is_main_process",
    "layers",
    "predict",
    "print_once",
    "process_set",
    "reduce",
    "report",
    "run",
    "shard",
    "synchronize_batch_normalization",
    "verify",
]

_MODULES = {
    "FP16": "distributed.half_precision",
    "BalanceConfig": "training.config",
    "CheckpointConfig": "checkpoint.config",
    "Checkpointer": "checkpoint.checkpointer",
    "CompositeReporter": "loggers.reporter",
    "Compression": "distributed.compression",
    "ConsoleReporter": "loggers.console",
    "CsvReporter": "loggers.csv_file",
    "DistributedGradientTape": "optim.gradient_tape",
    "DistributedOptimizer": "optim.distributed_optimizer",
    "GpuConfig": "distributed.config",
    "GuardConfig": "training.config",
    "JobWatch": "fault_tolerance.job_watch",
    "JsonLinesReporter": "loggers.json_lines",
    "LocalSGDConfig": "local_sgd.config",
    "LoggingConfig": "loggers.config",
    "MLflowReporter": "loggers.mlflow",
    "ParameterAverager": "local_sgd.averager",
    "PartialDistributedOptimizer": "optim.distributed_optimizer",
    "PowerSGD": "distributed.power_sgd",
    "QuorumConfig": "training.config",
    "RecordConfig": "training.config",
    "RankTimesReporter": "loggers.rank_times",
    "Reporter": "loggers.reporter",
    "TableReader": "checkpoint.table_reader",
    "Task": "tasks.task",
    "TensorBoardReporter": "loggers.tensorboard",
    "Topology": "distributed.runtime",
    "TrainConfig": "training.config",
    "Trainer": "training.trainer",
    "WandbReporter": "loggers.wandb",
    "WholeBatch": "optim.whole_batch",
    "autotune": "training.own_tuning",
    "average": "optim.gathering",
    "barrier": "distributed.own_values",
    "broadcast": "distributed.replica_consistency",
    "broadcast_object": "distributed.own_values",
    "evaluate": "training.evaluation",
    "gather": "optim.gathering",
    "gather_objects": "distributed.own_values",
    "init": "training.own_program",
    "is_main_process": "distributed.own_values",
    "predict": "training.prediction",
    "print_once": "distributed.own_values",
    "process_set": "distributed.runtime",
    "reduce": "distributed.own_values",
    "report": "runs.report.notebook",
    "run": "system.function_job",
    "shard": "data.sharding",
    "synchronize_batch_normalization": "optim.keras_calls",
    "verify": "training.equality.verify",
}

_WITHOUT_TENSORFLOW = ("report", "run")


def __dir__() -> list[str]:
    """For completion in interactive shells: public names are not attributes before their first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: TensorFlow takes seconds to import, and MPI must not start."""
    if name not in __all__:
        from hvdtrain.system import horovod_names

        replacement = horovod_names.replacement(name)
        hint = "" if replacement is None else f". Instead of Horovod's {name}, use {replacement}"
        # Python itself suggests names that are similar.
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}{hint}")
    if name not in _WITHOUT_TENSORFLOW:
        from hvdtrain.system.tensorflow_start import import_tensorflow

        import_tensorflow()
        # In case the program uses Horovod's own optimizer: it is rejected at its first update.
        importlib.import_module("hvdtrain.training.equality.fit")
    if name not in _MODULES:
        return importlib.import_module(f"hvdtrain.{name}")
    return getattr(importlib.import_module(f"hvdtrain.{_MODULES[name]}"), name)
