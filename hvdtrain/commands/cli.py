"""The command line: from arguments to a configuration, from a configuration to a command's exit code."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError
from cyclopts.argument import ArgumentCollection

from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.config import EvalConfig, ExportConfig, PredictConfig, RunConfig, TaskConfig
from hvdtrain.commands.help_pages import HelpPages, asks_for_all
from hvdtrain.config.fields import Config, as_dict, did_you_mean, shown
from hvdtrain.config.loading import read_options
from hvdtrain.config.unknown_options import hint_for
from hvdtrain.config.wording import flag_of, naming_flags
from hvdtrain.errors import DataError, HvdtrainError, UsageError
from hvdtrain.stores.urls import is_url, require_usable
from hvdtrain.system import environment
from hvdtrain.system.atomic_files import require_regular
from hvdtrain.system.interrupts import exit_on_interrupt
from hvdtrain.system.tensorflow_start import import_tensorflow
from hvdtrain.tasks.names import require_task

# The modules that run commands on all ranks. They import TensorFlow, and are only loaded when their command is run.
_MODULES = {"train": "train", "eval": "evaluate", "predict": "predict", "bench": "bench.command", "export": "export"}
# Those of commands that need neither ranks nor TensorFlow.
_LOCAL_MODULES = {
    "launch": "launch",
    "check": "check",
    "elastic": "elastic",
    "test": "self_test",
    "init": "init",
    "compare": "compare",
    "report": "report",
}
# Options that may be URLs of an object store.
_PATHS = ("data_dir", "run_dir", "resume", "checkpoint", "output")
_HELP = """Trains Keras 3 models on every rank that the launcher started: horovodrun -np 4 python -m hvdtrain

Exit codes: 0 done, 1 a failure in training, 64 usage, 65 data or a folder unusable, 70 replicas diverged, \
75 stopped early (run it again to resume), 78 ranks disagree."""

ConfigFile = Annotated[str | None, Parameter(name="--config", help="TOML file with the same options; flags win.")]


def train(*, config: RunConfig = RunConfig(), config_file: ConfigFile = None) -> None:
    """Train a task on all ranks (the default command)."""


def evaluate(*, config: EvalConfig = EvalConfig()) -> None:
    """Evaluate a run's checkpoint, or each new one with --watch, on all ranks."""


def predict(*, config: PredictConfig = PredictConfig()) -> None:
    """Write the predictions of a run's model to a file, computed on all ranks."""


def bench(*, config: BenchConfig = BenchConfig()) -> None:
    """Measure a task's step time on all ranks, and what they wait for."""


def export(*, config: ExportConfig = ExportConfig()) -> None:
    """Export a run's model for use without hvdtrain."""


def doctor() -> None:
    """Check whether a job can run here, and suggest fixes."""


Ranks = Annotated[
    str, Parameter(help="Number of ranks; auto: one for each GPU, else for each physical core, at most 8.")
]
Mpi = Annotated[bool, Parameter(negative="", help="Communicate over MPI (default: if Horovod was built with it).")]
Gloo = Annotated[bool, Parameter(negative="", help="Communicate over Gloo instead of MPI.")]


def launch(*, np: Ranks = "auto", mpi: Mpi = False, gloo: Gloo = False) -> None:
    """Start a command or a .py file on several ranks of this machine: launch --np 4 train.py

    The command begins at the first word that is not an option of launch.
    """


def check(
    *, np: Annotated[str, Parameter(help="Number of ranks.")] = "2", mpi: Mpi = False, gloo: Gloo = False
) -> None:
    """Compare the first steps of a program on several ranks with those of one process: check --np 2 train.py

    The program begins at the first word that is not an option of check. It ends after the compared steps.
    """


def elastic(
    members: Annotated[str, Parameter(name="MIN:MAX", help="Fewest and most processes that train together.")],
    /,
    *,
    np: Annotated[
        int | None, Parameter(help="Processes to start (default: MAX, or the sum of all slots). 0: others join.")
    ] = None,
    hosts: Annotated[
        str | None, Parameter(name=["--hosts", "-H"], help="Hosts and their slots, a:4,b:4 (default: this host).")
    ] = None,
    hostfile: Annotated[
        Path | None, Parameter(help="The same, one host per line: a slots=4. Changes are followed while the job runs.")
    ] = None,
    address: Annotated[
        str, Parameter(help="Address at which other hosts reach this one (default: on the route to the first one).")
    ] = "",
    port: Annotated[int, Parameter(help="Port to listen on; 0: any.")] = 0,
    env: Annotated[
        list[str] | None, Parameter(negative="", help="Forward another variable to the other hosts; repeatable.")
    ] = None,
    timeout: Annotated[
        float, Parameter(help="Seconds that fewer than MIN processes wait for others before they save and end.")
    ] = 600.0,
) -> None:
    """Start processes that continue to train when some die, leave or join: elastic 2:4 python -m hvdtrain

    The word after MIN:MAX begins the command.
    """


def self_test(*, mpi: Mpi = False, gloo: Gloo = False) -> None:
    """Check in a job of two ranks that reduction, broadcast and resuming work on this machine."""


def init(file: Annotated[Path, Parameter(help="The file to write, which must not exist yet.")], /) -> None:
    """Write a commented task file to start from."""


def compare(
    *runs: Annotated[str, Parameter(name="RUN", help="Run directories or their URLs, complete or not.")],
    plot: Annotated[
        Path | None, Parameter(help="Draw the losses against steps and time to this .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Print a table of runs."""


def report(
    *runs: Annotated[str, Parameter(name="RUN", help="Run directories or their URLs, complete or not.")],
    output: Annotated[Path, Parameter(help="The file to write.")] = Path("report.html"),
    serve: Annotated[
        bool, Parameter(negative="", help="Serve the page instead, updated while the run goes on, until Ctrl-C.")
    ] = False,
    address: Annotated[str, Parameter(help="Where to serve it: by default, to this host alone.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="The port to serve it on; 0 is any free one.")] = 0,
) -> None:
    """Write a page with the figures of runs: losses, times of ranks, members, checkpoints."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")], /) -> None:
    """Print a script that completes commands and options of hvdtrain: eval "$(hvdtrain completion bash)" """


_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "eval": evaluate,
    "predict": predict,
    "bench": bench,
    "export": export,
    "doctor": doctor,
    "launch": launch,
    "check": check,
    "elastic": elastic,
    "test": self_test,
    "init": init,
    "compare": compare,
    "report": report,
    "completion": completion,
}

# What follows the command, unless it is options alone.
_USAGE = {
    "doctor": "",
    "launch": "[OPTIONS] CMD…",
    "check": "[OPTIONS] CMD…",
    "init": "FILE",
    "compare": "[OPTIONS] RUN…",
    "report": "[OPTIONS] RUN…",
    "completion": "SHELL",
}


def parse(command: str | None, arguments: Sequence[str]) -> Config:
    """The configuration of a command, by default of ``train``. Exits after ``--help`` or ``--version``.

    Raises:
        UsageError: a flag, a key or a value is wrong.
        DataError: a folder that must exist does not.
    """
    bound, explicitly_set = _read(command, arguments)
    config: Any = bound.arguments["config"]
    if isinstance(config, TaskConfig):
        config = dataclasses.replace(config, explicitly_set=explicitly_set)
        require_task(config.task)
    _require_stores(config)
    _require_folders(config)
    return config


def _read(command: str | None, arguments: Sequence[str]) -> tuple[inspect.BoundArguments, frozenset[str]]:
    """The arguments of the function of a command, and the options that were set explicitly."""
    if command is not None and command not in _COMMANDS:
        hint = did_you_mean(command, _COMMANDS)
        if command.endswith(".py"):
            hint = f" For a file with a TASK: --task {command}. To start a script on several ranks: launch {command}"
        raise UsageError(f"the command must be one of {', '.join(_COMMANDS)}. Received: {shown(command)}.{hint}")
    explicitly_set: frozenset[str] = frozenset()

    def read(app: App, commands: tuple[str, ...], options: ArgumentCollection) -> None:
        nonlocal explicitly_set
        explicitly_set = read_options(options)

    shows_all = asks_for_all(arguments)
    app = _make_app(read, HelpPages(command or ("train" if shows_all else None), shows_all=shows_all))
    tokens = [*([command] if command else []), *arguments]
    if shows_all:
        tokens = [command or "train", "--help"]
    try:
        function, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    except UnknownOptionError as error:
        flag, _, _ = (error.token.keyword or error.token.value).partition("=")
        known = [name for each in error.argument_collection if each.parse for name in each.names]
        raise UsageError(
            f"Unknown option: {shown(flag)[1:-1]}.{hint_for(flag, known)} "
            f"See python -m hvdtrain {command or 'train'} --help"
        ) from error
    except CycloptsError as error:
        raise UsageError(f"{error!s:.1000} See python -m hvdtrain {command or 'train'} --help") from error
    if function not in _COMMANDS.values():  # --help or --version
        if environment.launcher().rank == 0:
            with contextlib.suppress(OSError):  # Nobody reads it, or the disk is full.
                function(*bound.args, **bound.kwargs)
        raise SystemExit(0)
    bound.apply_defaults()
    return bound, explicitly_set


def usage_of(command: str) -> str:
    """A command's usage line."""
    return f"python -m hvdtrain {command} {_USAGE.get(command, '[OPTIONS]')}".rstrip()


def _make_app(read: Callable[..., None] | None = None, help_pages: HelpPages | None = None) -> App:
    """The command line.

    Args:
        read: called with the arguments of a command before they are converted.
        help_pages: renders ``--help``.
    """
    app = App(
        name="python -m hvdtrain",
        help=_HELP,
        version=importlib.metadata.version("hvdtrain"),
        config=read,
        help_format="plaintext",
        help_formatter=help_pages,
        help_epilogue=None if help_pages is None else help_pages.epilogue,
        # The last of several wins, so that a script can append to its flags.
        default_parameter=Parameter(allow_repeating=True),
    )
    for name, each in _COMMANDS.items():
        app.command(each, name=name, usage=usage_of(name))
    app.default(train)
    return app


def _require_stores(config: Config) -> None:
    """Raises UsageError if an option is a URL whose packages are not installed."""
    for name, value in as_dict(config).items():
        if name in _PATHS and is_url(value):
            require_usable(flag_of(name), value)


def _require_folders(config: Any) -> None:
    folder = config.data_dir
    if folder is not None and not is_url(folder) and not os.path.isdir(folder):  # False also for a too long name
        raise DataError(f"--data-dir must be an existing folder. Received: {shown(config.data_dir)}")
    timeline = config.runtime.timeline
    if timeline is not None and not _can_be_written(Path(timeline)):
        raise DataError(f"--timeline must be a file in an existing folder. Received: {shown(timeline)}")


def _can_be_written(path: Path) -> bool:
    """Whether Horovod could open a file: if it cannot, it silently writes nothing."""
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
    with naming_flags():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if command == "doctor":
        from hvdtrain.commands.doctor.command import main as run_doctor  # imports nothing that may be broken

        return run_doctor(arguments)
    if command in _LOCAL_MODULES or command == "completion":
        return _run_here(command, arguments)
    config: Config | None = None
    refused: HvdtrainError | None = None
    try:
        config = parse(command, arguments)
    except HvdtrainError as error:
        refused = error
    if isinstance(config, RunConfig) and config.make_sample_data is not None:
        return _make_sample_data(config.task, Path(config.make_sample_data))
    launcher = environment.launcher()
    if refused is not None and launcher.name == "none":
        return _report(refused)
    if refused is not None and isinstance(refused.__cause__, CycloptsError) and launcher.has_one_command:
        # All ranks have refused these words: nobody waits for anybody.
        return _report(refused) if launcher.rank == 0 else refused.exit_code
    # Even after an error: other ranks may have none, and would wait for this one.
    with exit_on_interrupt():
        import_tensorflow()
        module = importlib.import_module(f"hvdtrain.commands.{_MODULES.get(command or 'train', 'train')}")
    return module.run(config, refused)


def _run_here(command: str, arguments: Sequence[str]) -> int:
    """Runs a command that needs no ranks."""
    try:
        if command == "completion":
            shell = _read(command, arguments)[0].arguments["shell"]
            print(_make_app().generate_completion(prog_name="hvdtrain", shell=shell), flush=True)
            return 0
        module = importlib.import_module(f"hvdtrain.commands.{_LOCAL_MODULES[command]}")
        if command in ("launch", "check", "elastic"):
            splitting = importlib.import_module("hvdtrain.commands.launch") if command == "check" else module
            own, rest = splitting.split_command(arguments)
            return int(module.run(rest, **_read(command, own)[0].arguments))
        return int(module.run(**_read(command, arguments)[0].arguments))
    except HvdtrainError as error:
        return _report(error)


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
