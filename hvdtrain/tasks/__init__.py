"""Tasks: a model, its data and its defaults; one file per built-in task."""

from hvdtrain.data import Data
from hvdtrain.tasks.loading import BUILT_IN, load_task, short_name
from hvdtrain.tasks.task import Task

__all__ = ["BUILT_IN", "Data", "Task", "load_task", "short_name"]
