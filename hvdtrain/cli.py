"""The command line: argv to configuration to exit code."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import config as configuration
from hvdtrain import process
from hvdtrain.config import BenchConfig, Config, EvalConfig, ExportConfig, TrainConfig
from hvdtrain.errors import DataError, HvdtrainError, UsageError

# Of each command: what it can be told, the module that runs it, and what it does.
_RUNS: dict[str, tuple[type[Config], str, str]] = {
    "train": (TrainConfig, "job", "Trains a Keras 3 model on every rank that the launcher started."),
    "eval": (EvalConfig, "evaluate", "Evaluates a checkpoint of a run, or each as it appears, on all ranks."),
    "bench": (BenchConfig, "bench", "Measures the steps of a task on all ranks, and what they wait for."),
    "export": (ExportConfig, "export", "Writes the model of a run for those who use it without hvdtrain."),
}
COMMANDS = (*_RUNS, "doctor")
_USAGE = """python -m hvdtrain [train] [options]
       python -m hvdtrain eval|export --run-dir DIR [options]
       python -m hvdtrain bench [options]
       python -m hvdtrain doctor
       python -m hvdtrain --task NAME --make-sample-data DIR"""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit: the other ranks have to be told first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See python -m hvdtrain --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise SystemExit(status)

    def print_help(self, file: Any = None) -> None:
        if process.find_launcher().rank == 0:
            super().print_help(file)


def _parser(command: str) -> argparse.ArgumentParser:
    kind, _, description = _RUNS[command]
    parser = _Parser(
        prog=f"python -m hvdtrain {command}",
        usage=_USAGE,
        description=description,
        epilog="Exit codes: 0 done, 1 a failure in training, 64 usage, 65 data or a folder unusable, "
        "70 replicas diverged, 75 stopped early: start it again to go on, 78 ranks disagree.",
        allow_abbrev=False,
    )
    names = dict.fromkeys(field.metadata["group"] for field in configuration.options(kind))
    groups = {name: parser.add_argument_group(name) for name in names}
    for field in configuration.options(kind):
        text = field.metadata["help"]
        if field.default is not None and field.default is not False:
            text += f" (default: {field.default})"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.metadata["choices"]:
            options["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
        else:
            options["metavar"] = field.metadata["metavar"]
        groups[field.metadata["group"]].add_argument(configuration.flag_of(field.name), **options)
    if command == "train":
        parser.add_argument("--config", metavar="FILE", help="the same options as keys of a TOML file; flags win")
        parser.add_argument(
            "--make-sample-data",
            metavar="DIR",
            help="write small files of the task's format into a folder that is new or empty, and end",
        )
        groups[configuration.RANKS].add_argument(
            "--adasum", dest="op", action="store_const", const="adasum", default=argparse.SUPPRESS, help="--op adasum"
        )
    return parser


def parse_train(argv: Sequence[str]) -> TrainConfig:
    """The configuration of training that the command line asks for.

    Raises:
        UsageError: a flag, a key or a value is wrong.
        DataError: a folder that has to be there is not.
    """
    flags = vars(_parser("train").parse_args(list(argv)))
    del flags["make_sample_data"]
    config_file = flags.pop("config")
    config = configuration.build(flags, config_file)
    _require_data_dir(config.data_dir)
    if config.timeline is not None and not Path(config.timeline).absolute().parent.is_dir():
        raise DataError(f"--timeline must be a file in an existing folder. Received: {config.timeline!r}")
    return config


def parse(command: str, argv: Sequence[str]) -> Config:
    """The configuration of a command; raises as :func:`parse_train`."""
    if command not in _RUNS:
        raise UsageError(f"the command must be one of {', '.join(COMMANDS)}. Received: {command!r}")
    if command == "train":
        return parse_train(argv)
    kind = _RUNS[command][0]
    flags = vars(_parser(command).parse_args(list(argv)))
    config: Any
    if issubclass(kind, TrainConfig):
        config = configuration.build(flags, None, kind)
    else:
        config = kind(**{name: configuration.converted(name, value, kind) for name, value in flags.items()})
    _require_data_dir(config.data_dir)
    return config


def _require_data_dir(data_dir: str | None) -> None:
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(f"--data-dir must be an existing folder. Received: {data_dir!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code; see the errors for their meaning.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    if command == "doctor":
        from hvdtrain import doctor

        return doctor.main(arguments)
    if command == "train" and any(each.partition("=")[0] == "--make-sample-data" for each in arguments):
        return _make_sample_data(arguments)
    return _run(command, arguments)


def _run(command: str, arguments: Sequence[str]) -> int:
    config: Config | None = None
    refused: HvdtrainError | None = None
    try:
        config = parse(command, arguments)
    except HvdtrainError as error:
        refused = error
    if refused is not None and process.find_launcher().name == "none":
        print(f"hvdtrain: {refused}", file=sys.stderr)
        return refused.exit_code
    # Also after an error, for the other ranks may have none: they wait for this one.
    process.import_tensorflow()
    module = importlib.import_module(f"hvdtrain.{_RUNS[command][1] if command in _RUNS else 'job'}")
    return module.run(config, refused)


def _make_sample_data(arguments: Sequence[str]) -> int:
    try:
        flags = vars(_parser("train").parse_args(list(arguments)))
        folder = Path(flags["make_sample_data"])
        if process.find_launcher().rank != 0:
            return 0
        process.import_tensorflow()
        from hvdtrain.tasks import sample_data

        sample_data.write(flags.get("task", TrainConfig.task), folder)
    except HvdtrainError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        return error.exit_code
    return 0
