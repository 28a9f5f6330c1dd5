"""Which mode a run is in, and what does not go with it."""

from hvdtrain.averaging import LocalTraining
from hvdtrain.errors import UsageError
from hvdtrain.modes.local import LocalMode
from hvdtrain.modes.sync import SyncMode, Training


def make_mode(training: Training, local: LocalTraining | None, *, total_steps: int, num_synchronized: int) -> SyncMode:
    """The mode that is asked for.

    Args:
        local: None for sync mode.
        num_synchronized: layers that normalise over all ranks.

    Raises:
        UsageError: the model or its training needs ranks in step, and local training has none.
    """
    if local is None:
        return SyncMode(training)
    accumulate = training.plan.accumulate
    if accumulate > 1:
        raise UsageError(
            f"accumulate saves reductions, of which local training has few. Received: accumulate={accumulate}. Use "
            "larger batches, or average less often."
        )
    if num_synchronized:
        raise UsageError(
            "BatchNormalization over all ranks needs them in step, which local training has not. Received: "
            f"{num_synchronized} synchronised layer(s). Leave --sync-batchnorm and synchronized=True out."
        )
    return LocalMode(training, local, total_steps)
