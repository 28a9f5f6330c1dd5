"""Loading of tasks by name: built-in, from a module, or from a file."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from hvdtrain.errors import UsageError
from hvdtrain.tasks.task import Task

BUILT_IN = {
    "digits": "hvdtrain.tasks.digits:TASK",
    "cifar10": "hvdtrain.tasks.cifar10:TASK",
    "mnist": "hvdtrain.tasks.mnist:CNN",
    "mnist-softmax": "hvdtrain.tasks.mnist:SOFTMAX",
    "tabular": "hvdtrain.tasks.tabular:TASK",
    "text": "hvdtrain.tasks.text:TASK",
    "synthetic-resnet50": "hvdtrain.tasks.synthetic:RESNET50",
    "synthetic-transformer": "hvdtrain.tasks.synthetic:TRANSFORMER",
}
"""Maps each built-in task to module:attribute."""


def load_task(name: str) -> Task:
    """Loads a task: a built-in name, ``package.module:attribute``, or ``path/to/file.py[:attribute]``.

    Raises:
        UsageError: there is no such task. Exceptions raised by the file itself propagate unchanged.
    """
    place, _, attribute = BUILT_IN.get(name, name).partition(":")
    if place.endswith(".py"):
        module = _module_of_file(Path(place))
    elif attribute:
        module = _module(place)
    else:
        raise UsageError(
            f"--task must name a task ({', '.join(BUILT_IN)}), package.module:attribute, or a file.py. "
            f"Received: {name!r}"
        )
    task = getattr(module, attribute or "TASK", None)
    if not isinstance(task, Task):
        what = "which does not exist" if task is None else f"which is a {type(task).__name__}"
        raise UsageError(
            f"--task must name a hvdtrain.Task. Received: {attribute or 'TASK'} of {place}, {what}. "
            "Write TASK = hvdtrain.Task(model=…, data=…, loss=…)."
        )
    return task


def short_name(name: str) -> str:
    """A task's name for folders: ``digits``, or ``my_task`` for ``path/to/my_task.py``."""
    place, _, attribute = name.partition(":")
    if place.endswith(".py"):
        place = Path(place).stem
    return re.sub(r"[^\w.-]", "-", "-".join(each for each in (place, attribute) if each))


def _module(name: str) -> ModuleType:
    # A script's sys.path starts with the script's folder, not the current one.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UsageError(
            f"--task must name a module that can be imported. Received: {name!r} ({error}). Start in its folder, or "
            "add that folder to PYTHONPATH."
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"--task must name a file that exists on every rank. Received: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Keras looks up the classes of a saved model by module name.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
