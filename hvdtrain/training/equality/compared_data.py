"""Compares the order of the data that ranks have sharded, and the layers that prepare it."""

from collections.abc import Sequence

from hvdtrain.data import sharded_order
from hvdtrain.distributed import noted_layers
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system.terminal import some_of
from hvdtrain.training.equality.step_check import Finding

_OTHER_ORDER = (
    "data must be in the same order on all ranks when it is sharded. Received: different orders, so that some samples "
    "are seen twice, and others never. Call hvdtrain.init(seed=…) before the data is shuffled, or shuffle each rank's "
    "part, and pass cycle_length to interleave: its default is the number of cores of a rank"
)
_OTHER_LAYERS = (
    "layers must be adapted to the same data on all ranks. Received: different states of {names}, so that ranks "
    "prepare samples differently. Adapt layers, or set their vocabulary, before hvdtrain.shard"
)


def compare_data(collectives: Collectives) -> Finding | None:
    """What is wrong with the data of the ranks; None: nothing. All ranks must call it."""
    everyone = collectives.allgather((sharded_order.noted(), noted_layers.noted()))
    if sharded_order.differ([orders for orders, _ in everyone]):
        return Finding({}, unequal=_OTHER_ORDER)
    if names := _differing([layers for _, layers in everyone]):
        return Finding({}, unequal=_OTHER_LAYERS.format(names=some_of([repr(name) for name in names])))
    return None


def _differing(everyone: Sequence[Sequence[noted_layers.Noted]]) -> list[str]:
    """The names of the layers that differ. Ranks that have adapted other numbers of layers are not compared.

    The layers of a model do not differ any more: see :func:`hvdtrain.broadcast`.
    """
    if len({len(layers) for layers in everyone}) > 1:
        return []
    return sorted(
        {each[0].name for each in zip(*everyone, strict=True) if len({one.state for one in each} - {b""}) > 1}
    )
