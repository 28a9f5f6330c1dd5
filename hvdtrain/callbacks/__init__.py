"""Keras callbacks for ``model.fit`` with ``hvdtrain.DistributedOptimizer``, on all ranks."""

from hvdtrain.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.distributed import distributed
from hvdtrain.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdtrain.callbacks.metric_average import MetricAverageCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "distributed",
]
