"""``hvdtrain.verify``: checks a step of a training loop of one's own."""

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import require_keras_model
from hvdtrain.errors import EndOfCheckedSteps, UnequalError
from hvdtrain.optim.only_checks import end_if_only_checking, print_comparison
from hvdtrain.optim.own_loops import note_verified_step
from hvdtrain.system import environment
from hvdtrain.system.terminal import write
from hvdtrain.training.equality.compared_data import compare_data
from hvdtrain.training.equality.step_check import Finding, StepCheck


def verify(
    step: Callable[[Any], Any], batch: Any, model: keras.Model, *, collectives: Collectives | None = None
) -> Finding:
    """Checks that a step on all ranks is that of one process: for training loops of one's own.

    The ranks make the step together, each with a part of its batch, and then one process makes it with all parts.
    Gradients, variables, metrics and returned values are compared. Then everything is put back: it is as if no step
    was made. Call it once, before the loop; ``hvdtrain check`` ends the program with it. ``model.fit`` and
    ``hvdtrain.Trainer`` check by themselves.

    Args:
        step: makes a training step of a batch. It may be a ``tf.function``; here it runs eagerly. What it returns is
            compared if it is a dictionary of numbers, such as losses that are means over samples.
        batch: this rank's samples: a tensor, or a structure of tensors with a sample in each row.
        model: what the step trains, with its optimizers built.
        collectives: the ranks that train together (default: those of ``hvdtrain.init()``).

    Returns:
        What was compared; on one rank nothing.

    Raises:
        UnequalError: on every rank: the step is not that of one process, and the message says where; or ranks have
            sharded data in different orders.
    """
    require_keras_model(model)
    note_verified_step()
    collectives = collectives or runtime.current().collectives
    if collectives.size == 1:
        return Finding({}, unchecked="there is one rank")
    of_data = compare_data(collectives)
    finding = StepCheck(step, model, collectives).run(batch) if of_data.unequal is None else of_data
    if of_data.noted is not None and collectives.rank == 0:
        write(f"hvdtrain: {of_data.noted}")
    if finding.unequal is not None:
        raise UnequalError(f"{finding.unequal}.")
    if finding.unchecked is not None:
        end_if_only_checking(finding.unchecked, collectives)
    elif environment.only_checks():
        print_comparison(f"the step is that of one process. Compared: {finding.summary}.", collectives)
        raise EndOfCheckedSteps(0)
    return finding
