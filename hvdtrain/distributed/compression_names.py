"""Makes a compression from its name."""

from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.config import POWER_SGD, parse_compression
from hvdtrain.distributed.half_precision import FP16
from hvdtrain.distributed.power_sgd import PowerSGD


def make_compression(compression: str | Compression, start_after: int = 0) -> Compression | None:
    """The compression that an option names; None for ``none``.

    Raises:
        UsageError: there is no compression of this name.
    """
    if isinstance(compression, Compression):
        return compression
    name, rank = parse_compression(compression)
    if name == POWER_SGD:
        return PowerSGD(rank=rank, start_after=start_after)
    return FP16(start_after=start_after) if name == "fp16" else None
