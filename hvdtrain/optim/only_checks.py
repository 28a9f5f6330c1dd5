"""What ``hvdtrain check`` says of a program of which no step is compared, and how it ends."""

import sys
from pathlib import Path

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import EndOfCheckedSteps, UnequalError
from hvdtrain.system import environment

UNCHECKED = "the training step cannot be compared with that of one process: {}"


def end_if_only_checking(reason: str, collectives: Collectives) -> None:
    """Under ``hvdtrain check``, ends a program whose steps are not compared, on all ranks."""
    if environment.only_checks():
        print_on_rank_0(UNCHECKED.format(reason), collectives)
        raise EndOfCheckedSteps(UnequalError.exit_code)


def print_comparison(text: str, collectives: Collectives) -> None:
    """Prints what was compared, without which ``hvdtrain check`` fails."""
    print_on_rank_0(text, collectives)
    if (file := environment.get(environment.ONLY_CHECK)) is not None:
        Path(file).touch()


def print_on_rank_0(text: str, collectives: Collectives) -> None:
    """Prints a line about checks."""
    if collectives.rank == 0:
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
