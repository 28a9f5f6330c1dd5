"""The command line: from arguments to a configuration, from a configuration to a command's exit code."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection

from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.config import EvalConfig, ExportConfig, RunConfig, TaskConfig
from hvdtrain.config.fields import Config, shown
from hvdtrain.config.loading import read_options
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.system import environment
from hvdtrain.system.atomic_files import require_regular
from hvdtrain.system.tensorflow_start import import_tensorflow

# The module that runs each command. It imports TensorFlow, so that it is only loaded when its command is run.
_MODULES = {"train": "train", "eval": "evaluate", "bench": "bench.command", "export": "export"}
_HELP = """Trains Keras 3 models on every rank that the launcher started: horovodrun -np 4 python -m hvdtrain

Exit codes: 0 done, 1 a failure in training, 64 usage, 65 data or a folder unusable, 70 replicas diverged,
75 stopped early: restart it to resume, 78 ranks disagree."""

ConfigFile = Annotated[str | None, Parameter(name="--config", help="TOML file with the same options; flags win.")]


def train(*, config: RunConfig = RunConfig(), config_file: ConfigFile = None) -> None:
    """Train a task on all ranks (the default command)."""


def evaluate(*, config: EvalConfig = EvalConfig()) -> None:
    """Evaluate a checkpoint of a run, or each as it appears, on all ranks."""


def bench(*, config: BenchConfig = BenchConfig()) -> None:
    """Measure the steps of a task on all ranks, and what they wait for."""


def export(*, config: ExportConfig = ExportConfig()) -> None:
    """Write the model of a run for use without hvdtrain."""


def doctor() -> None:
    """Check whether a job can run here, and say how to fix what is wrong."""


_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "eval": evaluate,
    "bench": bench,
    "export": export,
    "doctor": doctor,
}


def parse(command: str | None, arguments: Sequence[str]) -> Config:
    """The configuration of a command, by default of ``train``. Exits after ``--help`` or ``--version``.

    Raises:
        UsageError: a flag, a key or a value is wrong.
        DataError: a folder that must exist does not.
    """
    if command is not None and command not in _COMMANDS:
        raise UsageError(f"the command must be one of {', '.join(_COMMANDS)}. Received: {shown(command)}")
    explicitly_set: frozenset[str] = frozenset()

    def read(app: App, commands: tuple[str, ...], options: ArgumentCollection) -> None:
        nonlocal explicitly_set
        explicitly_set = read_options(options)

    app = App(
        name="python -m hvdtrain",
        help=_HELP,
        version=importlib.metadata.version("hvdtrain"),
        config=read,
        help_format="plaintext",
        # The last of several wins, so that a script can append to its flags.
        default_parameter=Parameter(allow_repeating=True),
    )
    for name, each in _COMMANDS.items():
        app.command(each, name=name)
    app.default(train)
    tokens = [*([command] if command else []), *arguments]
    try:
        function, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise UsageError(f"{error!s:.1000} See python -m hvdtrain {command or 'train'} --help") from error
    if function not in _COMMANDS.values():  # --help or --version
        if environment.launcher().rank == 0:
            with contextlib.suppress(OSError):  # Nobody reads it, or the disk is full.
                function(*bound.args, **bound.kwargs)
        raise SystemExit(0)
    bound.apply_defaults()
    config: Any = bound.arguments["config"]
    if isinstance(config, TaskConfig):
        config = dataclasses.replace(config, explicitly_set=explicitly_set)
    _require_folders(config)
    return config


def _require_folders(config: Any) -> None:
    if config.data_dir is not None and not os.path.isdir(config.data_dir):  # False also for a name that is too long
        raise DataError(f"--data-dir must be an existing folder. Received: {shown(config.data_dir)}")
    timeline = config.runtime.timeline
    if timeline is not None and not _can_be_written(Path(timeline)):
        raise DataError(f"--timeline must be a file in an existing folder. Received: {shown(timeline)}")


def _can_be_written(path: Path) -> bool:
    """Whether Horovod could open a file: where it cannot, it writes nothing and says nothing."""
    try:
        require_regular(path)
        return path.absolute().parent.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a null character
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code; see the errors for their meaning.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if command == "doctor":
        from hvdtrain.commands.doctor.command import main as run_doctor  # checks what the rest cannot do without

        return run_doctor(arguments)
    config: Config | None = None
    refused: HvdtrainError | None = None
    try:
        config = parse(command, arguments)
    except HvdtrainError as error:
        refused = error
    if isinstance(config, RunConfig) and config.make_sample_data is not None:
        return _make_sample_data(config.task, Path(config.make_sample_data))
    if refused is not None and environment.launcher().name == "none":
        return _report(refused)
    # Even after an error: the other ranks may have none, and wait for this one.
    import_tensorflow()
    module = importlib.import_module(f"hvdtrain.commands.{_MODULES.get(command or 'train', 'train')}")
    return module.run(config, refused)


def _make_sample_data(task: str, folder: Path) -> int:
    if environment.launcher().rank == 0:
        import_tensorflow()
        from hvdtrain.tasks import sample_data

        try:
            sample_data.write(task, folder)
        except HvdtrainError as error:
            return _report(error)
    return 0


def _report(error: HvdtrainError) -> int:
    print(f"hvdtrain: {error}", file=sys.stderr)
    return error.exit_code
