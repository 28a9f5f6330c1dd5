"""Loading of tasks by name: built-in, from a module, or from a file."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from hvdtrain.errors import UsageError
from hvdtrain.tasks.names import BUILT_IN, import_from_here, missing_module, require_file, unknown_task
from hvdtrain.tasks.task import Task


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
        raise unknown_task(name)
    task = getattr(module, attribute or "TASK", None)
    if not isinstance(task, Task):
        what = "which does not exist" if task is None else f"which is a {type(task).__name__}"
        raise UsageError(
            f"--task must name a hvdtrain.Task. Received: {attribute or 'TASK'} of {place}, {what}. "
            "Write TASK = hvdtrain.Task(model=…, data=…, loss=…)."
        )
    return task


def _module(name: str) -> ModuleType:
    import_from_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise missing_module(name, str(error)) from error


def _module_of_file(path: Path) -> ModuleType:
    require_file(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Keras looks up the classes of a saved model by module name.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(
            f"--task must name a file that Python can read. Received: {error.filename}, line {error.lineno}: "
            f"{error.msg}: {(error.text or '').strip()!r:.200}"
        ) from error
    return module
