"""Compares the data of the ranks: its order when it is sharded, the layers that prepare it, and its samples."""

from collections.abc import Sequence

from hvdtrain.data import generated_order, sharded_order
from hvdtrain.distributed import noted_layers, noted_samples
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system.terminal import some_of
from hvdtrain.training.equality.compared_samples import overlap_of
from hvdtrain.training.equality.step_check import Finding

_OTHER_ORDER = (
    "data must be in the same order on all ranks when it is sharded. Received: different orders, or parts, so that "
    "some samples are seen twice, and others never. Shard all of the data, not what a rank has taken of it; call "
    "hvdtrain.init(seed=…) before it is shuffled, or shuffle each rank's part; and pass cycle_length to interleave: "
    "its default is the number of cores of a rank"
)
_OTHER_ELEMENTS = (
    "a generator yields other elements on other ranks, before hvdtrain.shard divides them. If it shuffles, some "
    "samples are seen twice, and others never: call hvdtrain.init(seed=…) before it draws numbers, and pass a seed to "
    "np.random.default_rng."
)
_OTHER_LAYERS = (
    "layers must be adapted to the same data on all ranks. Received: different states of {names}, so that ranks "
    "prepare samples differently. Adapt layers, or set their vocabulary, before hvdtrain.shard"
)


def compare_data(collectives: Collectives) -> Finding:
    """What is wrong with the data of the ranks. All ranks must call it."""
    own = sharded_order.noted(), noted_layers.noted(), generated_order.noted(), noted_samples.take()
    orders, layers, generated, samples = zip(*collectives.allgather(own), strict=True)
    if sharded_order.differ(orders):
        return Finding({}, unequal=_OTHER_ORDER)
    if names := _differing(layers):
        return Finding({}, unequal=_OTHER_LAYERS.format(names=some_of([repr(name) for name in names])))
    return Finding({}, noted=_OTHER_ELEMENTS if generated_order.differ(generated) else overlap_of(samples))


def _differing(everyone: Sequence[Sequence[noted_layers.Noted]]) -> list[str]:
    """The names of the layers that differ. Ranks that have adapted other numbers of layers are not compared.

    The layers of a model do not differ any more: see :func:`hvdtrain.broadcast`.
    """
    if len({len(layers) for layers in everyone}) > 1:
        return []
    return sorted(
        {each[0].name for each in zip(*everyone, strict=True) if len({one.state for one in each} - {b""}) > 1}
    )
