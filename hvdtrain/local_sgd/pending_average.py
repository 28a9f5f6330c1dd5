"""An average of parameters whose allreduce has started, and that is not merged yet."""

import dataclasses

from hvdtrain.local_sgd.outer_optimizer import Flats
from hvdtrain.system.background import BackgroundTask, ImmediateTask


@dataclasses.dataclass
class PendingAverage:
    """The average of a round whose allreduce has started, not yet merged."""

    sent: Flats
    """This rank's values when the allreduce started."""
    totals: BackgroundTask[Flats] | ImmediateTask[Flats]
    """Sums over all ranks: displacements times samples, and the facts."""
    steps_since: int = 0
