"""Training loops of a program's own: none of their steps is compared, unless the program verifies one."""

import atexit
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.program_operations import has_own_reductions
from hvdtrain.optim import global_loss
from hvdtrain.optim.made_steps import counts_steps
from hvdtrain.optim.only_checks import end_if_only_checking, print_on_rank_0
from hvdtrain.optim.pipeline import current_scope

_REMEDY = "Call hvdtrain.verify(step, batch, model) before the loop"
_ALONE = (
    "each rank trains alone in this loop: its optimizer must be distributed. Received: {}, and gradients that nothing "
    "has averaged. Wrap it in hvdtrain.DistributedOptimizer, or use hvdtrain.DistributedGradientTape"
)
_ALONE_WITHOUT_KERAS = (
    "each rank has trained alone: its gradients must be averaged over ranks. Received: those of a loop without an "
    "optimizer of Keras, which nothing has averaged. Use hvdtrain.DistributedGradientTape, unless each rank is meant "
    "to train alone."
)
_is_known = _is_lone_loop_known = _watches_gradients = False


def note_verified_step() -> None:
    """The program verifies a step."""
    global _is_known
    _is_known = True


def is_own_loop(collectives: Collectives) -> bool:
    """Whether ranks are in a step that neither ``model.fit`` nor ``Trainer`` makes."""
    return collectives.size > 1 and current_scope() is None and not global_loss.is_in_train_step()


def compares_replicas(collectives: Collectives) -> bool:
    """Whether ranks are in such a step, and their replicas are compared; not if they may change between its steps."""
    return is_own_loop(collectives) and not collectives.may_change and runtime.on_unequal() != "ignore"


def note_lone_update(optimizer: keras.optimizers.Optimizer) -> None:
    """At an update by an optimizer that is not distributed: the first in a loop that reduces nothing is reported."""
    global _is_lone_loop_known
    collectives = runtime.collectives()
    if _is_lone_loop_known or not is_own_loop(collectives) or has_own_reductions():
        return
    end_if_only_checking(_ALONE.format(optimizer.name), collectives)
    _is_lone_loop_known = True
    if runtime.on_unequal() != "ignore":
        print_on_rank_0(f"{_ALONE.format(optimizer.name)}, unless each rank is meant to train alone.", collectives)


def note_gradients_by(sources: Sequence[Any]) -> None:
    """At the gradients of a tape: the program's end reports those by variables, if it never reduces any.

    Until then, the program may average them.
    """
    global _watches_gradients
    if _watches_gradients or not any(isinstance(each, keras.Variable | tf.Variable) for each in sources):
        return
    if is_own_loop(runtime.collectives()):
        _watches_gradients = True
        atexit.register(_tell_of_lone_gradients)


def _tell_of_lone_gradients() -> None:
    if not (_is_lone_loop_known or has_own_reductions() or counts_steps() or runtime.on_unequal() == "ignore"):
        print_on_rank_0(_ALONE_WITHOUT_KERAS, runtime.collectives())


def note_reduction(config: ReductionConfig, collectives: Collectives) -> None:
    """At a reduction of gradients: the first one of a loop that is not verified is reported, on rank 0.

    Under ``hvdtrain check``, it ends the program, on all ranks.
    """
    global _is_known
    if not is_own_loop(collectives):
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
