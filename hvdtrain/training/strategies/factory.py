"""From the configuration to a strategy."""

from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import require_whole_state
from hvdtrain.optim.hook_state import model_hooks
from hvdtrain.training.config import StepConfig
from hvdtrain.training.strategies.local import LocalStrategy
from hvdtrain.training.strategies.post_local import PostLocalStrategy
from hvdtrain.training.strategies.quorum import QuorumStrategy
from hvdtrain.training.strategies.strategy import Strategy, StrategyContext
from hvdtrain.training.strategies.sync import SyncStrategy


def make_strategy(context: StrategyContext, config: StepConfig, *, total_steps: int, num_synchronized: int) -> Strategy:
    """The strategy of a configuration.

    Args:
        num_synchronized: number of the model's layers that normalize over all ranks.

    Raises:
        UsageError: the model needs ranks in lockstep, and the strategy keeps none; or the strategy does not suit it.
    """
    if config.stragglers.is_active or config.mode == "local":
        for hooks in model_hooks(context.model):
            require_whole_state(hooks, "--quorum" if config.stragglers.is_active else "--mode local")
    if config.stragglers.is_active:
        if num_synchronized:
            raise UsageError(
                "BatchNormalization over all ranks needs them in lockstep, which --quorum does not keep. Received: "
                f"{num_synchronized} synchronized layer(s). Leave --sync-batchnorm and synchronized=True out."
            )
        return QuorumStrategy(context, config.stragglers)
    if config.mode == "sync":
        return SyncStrategy(context)
    if num_synchronized:
        raise UsageError(
            "BatchNormalization over all ranks needs them in lockstep, which local SGD does not keep. Received: "
            f"{num_synchronized} synchronized layer(s). Leave --sync-batchnorm and synchronized=True out."
        )
    local = LocalStrategy(context, config.local_sgd, total_steps)
    if config.local_sgd.sync_steps_first == 0:
        return local
    return PostLocalStrategy(SyncStrategy(context), local, config.local_sgd.sync_steps_first, context.progress)
