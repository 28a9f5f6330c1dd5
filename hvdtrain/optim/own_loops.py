"""Training loops of a program's own: none of their steps is compared, unless the program verifies one."""

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.optim import global_loss
from hvdtrain.optim.only_checks import end_if_only_checking, print_on_rank_0
from hvdtrain.optim.pipeline import current_scope

_REMEDY = "Call hvdtrain.verify(step, batch, model) before the loop"
_is_known = False


def note_verified_step() -> None:
    """The program verifies a step."""
    global _is_known
    _is_known = True


def note_reduction(config: ReductionConfig, collectives: Collectives) -> None:
    """At a reduction of gradients: the first one of a loop that is not verified is reported, on rank 0.

    Under ``hvdtrain check``, it ends the program, on all ranks.
    """
    global _is_known
    if collectives.size == 1 or current_scope() is not None or global_loss.is_in_train_step():
        return
    end_if_only_checking(f"it is made by a loop of the program's own. {_REMEDY}", collectives)
    # In an elastic job, a rank that joins would verify a step while the others train.
    if _is_known or runtime.on_unequal() == "ignore" or not config.is_linear or collectives.may_change:
        return
    _is_known = True
    print_on_rank_0(
        "the steps of this training loop are not compared with those of one process, which would show whether its loss "
        f"can be averaged over ranks. {_REMEDY}, or hvdtrain.init(on_unequal='ignore') to leave out this line.",
        collectives,
    )
