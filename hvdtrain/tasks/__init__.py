"""What can be trained: a model, its data and its defaults, one file a built-in task."""

from hvdtrain.tasks.loading import BUILT_IN, load_task, short_name
from hvdtrain.tasks.task import Data, Task

__all__ = ["BUILT_IN", "Data", "Task", "load_task", "short_name"]
