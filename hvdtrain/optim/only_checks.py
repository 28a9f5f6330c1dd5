"""What ``hvdtrain check`` says of a program of which no step is compared, and how it ends."""

import sys

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import EndOfCheckedSteps, UnequalError
from hvdtrain.optim import global_loss
from hvdtrain.optim.pipeline import current_scope
from hvdtrain.system import environment

UNCHECKED = "the training step cannot be compared with that of one process: {}"
_OWN_LOOP = "it is made by a loop of the program's own. Call hvdtrain.verify(step, batch, model) before the loop"


def end_if_only_checking(reason: str, collectives: Collectives) -> None:
    """Under ``hvdtrain check``, ends a program whose steps are not compared, on all ranks."""
    if environment.only_checks():
        print_on_rank_0(UNCHECKED.format(reason), collectives)
        raise EndOfCheckedSteps(UnequalError.exit_code)


def end_own_loop_if_only_checking(collectives: Collectives) -> None:
    """The same, at the first reduction of gradients in a loop of the program's own."""
    if current_scope() is None and not global_loss.is_in_train_step() and collectives.size > 1:
        end_if_only_checking(_OWN_LOOP, collectives)


def print_on_rank_0(text: str, collectives: Collectives) -> None:
    """Prints a line about checks."""
    if collectives.rank == 0:
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
