"""On all ranks: each program is broken, and hvdtrain says on every rank what is wrong."""

import keras
import pytest
import table
from breaks import GLOBAL_BATCH, OF_FAMILIES, break_of, report_of
from models import SHARED_GPUS
from programs import PROGRAMS, REFUSED
from programs.own_train_steps import custom_train_step_with_added_losses

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.errors import HvdtrainError

TOPOLOGY = hvdtrain.init(gpus=SHARED_GPUS)
COLLECTIVES = runtime.current().collectives


def train(program):
    """Trains as users do; the ranks' initial weights differ until they are broadcast."""
    keras.utils.set_random_seed(1 + TOPOLOGY.rank)
    model, x, y = program(hvdtrain.DistributedOptimizer)
    hvdtrain.broadcast(model)
    x, y = hvdtrain.shard(x, y)
    model.fit(x, y, GLOBAL_BATCH // TOPOLOGY.size, shuffle=False, verbose=0)


def parameters():
    """All programs that are not refused; CI runs the first one of each family, and one that returns dictionaries."""
    often = {custom_train_step_with_added_losses, *(family.PROGRAMS[0] for family in OF_FAMILIES)}
    for program in PROGRAMS:
        if program.__name__ not in REFUSED:
            yield pytest.param(program, id=program.__name__, marks=[] if program in often else pytest.mark.long)


@pytest.mark.parametrize("program", parameters())
def test_broken_program(program, record_property):
    broken = break_of(program)
    with broken(), pytest.raises(HvdtrainError) as caught:
        train(program)
    assert {report_of(each) for each in COLLECTIVES.allgather(str(caught.value))} == {broken.reports}
    record_property(table.FOUND, f"{broken.words}: {broken.reports}")
