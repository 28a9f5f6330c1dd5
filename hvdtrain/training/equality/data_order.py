"""Compares the order of the data that ranks have sharded."""

from hvdtrain.data import sharded_order
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.training.equality.step_check import Finding

_OTHER_ORDER = (
    "data must be in the same order on all ranks when it is sharded. Received: different orders, so that some samples "
    "are seen twice, and others never. Call hvdtrain.init(seed=…) before the data is shuffled, or shuffle each rank's "
    "part, and pass cycle_length to interleave: its default is the number of cores of a rank"
)


def compare_orders(collectives: Collectives) -> Finding | None:
    """What is wrong with the order of the data that ranks have sharded; None: nothing. All ranks must call it."""
    is_different = sharded_order.differ(collectives.allgather(sharded_order.noted()))
    return Finding({}, unequal=_OTHER_ORDER) if is_different else None
