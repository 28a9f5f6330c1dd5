"""Names of tasks, checked without loading them: a task imports TensorFlow, which takes seconds."""

import importlib.util
import re
import sys
from pathlib import Path

from hvdtrain.config.fields import did_you_mean, shown
from hvdtrain.errors import UsageError

BUILT_IN = {
    "digits": "hvdtrain.tasks.digits:TASK",
    "cifar10": "hvdtrain.tasks.cifar10:TASK",
    "mnist": "hvdtrain.tasks.mnist:CNN",
    "mnist-softmax": "hvdtrain.tasks.mnist:SOFTMAX",
    "tabular": "hvdtrain.tasks.tabular:TASK",
    "text": "hvdtrain.tasks.text:TASK",
    "synthetic-resnet50": "hvdtrain.tasks.synthetic:RESNET50",
    "synthetic-transformer": "hvdtrain.tasks.synthetic:TRANSFORMER",
    "synthetic-dlrm": "hvdtrain.tasks.dlrm:TASK",
}
"""Maps each built-in task to module:attribute."""


def require_task(name: str) -> None:
    """Checks that a task is built in, or that its file or package exists; does not load it.

    Raises:
        UsageError: it does not exist.
    """
    place, _, attribute = BUILT_IN.get(name, name).partition(":")
    if place.endswith(".py"):
        require_file(Path(place))
    elif not attribute:
        raise unknown_task(name)
    elif name not in BUILT_IN and not _has_package(place):
        raise missing_module(place, f"no module named {place.partition('.')[0]!r}")


def short_name(name: str) -> str:
    """A task's name for folders: ``digits``, or ``my_task`` for ``path/to/my_task.py``."""
    place, _, attribute = name.partition(":")
    if place.endswith(".py"):
        place = Path(place).stem
    return re.sub(r"[^\w.-]", "-", "-".join(each for each in (place, attribute) if each))


def require_file(path: Path) -> None:
    """Raises UsageError if a task's file does not exist."""
    try:
        if path.is_file():
            return
        others = [each.name for each in path.parent.glob("*.py")]
    except (OSError, ValueError):  # a name that is too long, or has a null character
        others = []
    raise UsageError(
        f"--task must name a file that exists on every rank. Received: {shown(str(path))}."
        f"{did_you_mean(path.name, others)}"
    )


def unknown_task(name: str) -> UsageError:
    """The error of a name that is neither a built-in task, nor an attribute of a module, nor a file."""
    file = f"{name}.py"
    is_file = "\0" not in name and len(name) < 200 and Path(file).is_file()
    hint = f" Did you mean {file}?" if is_file else did_you_mean(name, BUILT_IN)
    return UsageError(
        f"--task must name a task ({', '.join(BUILT_IN)}), package.module:attribute, or a file.py. "
        f"Received: {shown(name)}.{hint}"
    )


def missing_module(name: str, why: str) -> UsageError:
    """The error of a module that cannot be found."""
    return UsageError(
        f"--task must name a module that can be imported. Received: {shown(name)} ({why}). Start in its folder, or "
        "add that folder to PYTHONPATH."
    )


def run_dir_of(run_dir: str | None, task: str) -> str:
    """The path or URL of a run of a task: ``--run-dir``, or the default."""
    return run_dir or f"runs/{short_name(task)}"


def import_from_here() -> None:
    """Lets modules in the current folder be imported: a script's path starts with the script's own folder."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _has_package(module: str) -> bool:
    """Whether the outermost package of a module exists; does not import anything."""
    import_from_here()
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):  # not a name of a module
        return False
