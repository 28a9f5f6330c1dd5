"""The command line: argv to configuration to exit code."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import config as configuration
from hvdtrain import process
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, HvdtrainError, UsageError

COMMANDS = ("train", "doctor")


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit: the other ranks have to be told first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See python -m hvdtrain --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise SystemExit(status)

    def print_help(self, file: Any = None) -> None:
        if process.find_launcher().rank == 0:
            super().print_help(file)


def _train_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hvdtrain",
        usage="python -m hvdtrain [train] [options]\n       python -m hvdtrain doctor",
        description="Trains a Keras 3 model on every rank that the launcher started, equal to one process; "
        "doctor tells whether a job could run here.",
        epilog="Exit codes: 0 done, 1 a failure in training, 64 usage, 65 data or a folder unusable, "
        "70 replicas diverged, 75 stopped early: start it again to go on, 78 ranks disagree.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="the same options as keys of a TOML file; flags win")
    names = dict.fromkeys(field.metadata["group"] for field in dataclasses.fields(TrainConfig))
    groups = {name: parser.add_argument_group(name) for name in names}
    for field in dataclasses.fields(TrainConfig):
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
    groups[configuration.RANKS].add_argument(
        "--adasum", dest="op", action="store_const", const="adasum", default=argparse.SUPPRESS, help="--op adasum"
    )
    return parser


def parse_train(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the command line asks for.

    Raises:
        UsageError: a flag, a key or a value is wrong.
    """
    flags = vars(_train_parser().parse_args(list(argv)))
    config_file = flags.pop("config")
    config = configuration.build(flags, config_file)
    if config.data_dir is not None and not Path(config.data_dir).is_dir():
        raise DataError(f"--data-dir must be an existing folder. Received: {config.data_dir!r}")
    if config.timeline is not None and not Path(config.timeline).absolute().parent.is_dir():
        raise DataError(f"--timeline must be a file in an existing folder. Received: {config.timeline!r}")
    return config


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
    return _train(command, arguments)


def _train(command: str, arguments: Sequence[str]) -> int:
    config: TrainConfig | None = None
    refused: HvdtrainError | None = None
    try:
        if command != "train":
            raise UsageError(f"the command must be one of {', '.join(COMMANDS)}. Received: {command!r}")
        config = parse_train(arguments)
    except HvdtrainError as error:
        refused = error
    if refused is not None and process.find_launcher().name == "none":
        print(f"hvdtrain: {refused}", file=sys.stderr)
        return refused.exit_code
    # Also after an error, for the other ranks may have none: they wait for this one.
    process.import_tensorflow()
    from hvdtrain import job

    return job.run(config, refused)
