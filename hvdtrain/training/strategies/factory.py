"""From the configuration to a strategy."""

from hvdtrain.training.config import StepConfig
from hvdtrain.training.strategies.local import LocalStrategy
from hvdtrain.training.strategies.post_local import PostLocalStrategy
from hvdtrain.training.strategies.quorum import QuorumStrategy
from hvdtrain.training.strategies.strategy import Strategy, StrategyContext
from hvdtrain.training.strategies.sync import SyncStrategy


def make_strategy(context: StrategyContext, config: StepConfig, *, total_steps: int) -> Strategy:
    """The strategy of a configuration.

    Raises:
        UsageError: it does not suit the ranks.
    """
    if config.stragglers.is_active:
        return QuorumStrategy(context, config.stragglers, config.recording)
    if config.mode == "sync":
        return SyncStrategy(context)
    local = LocalStrategy(context, config.local_sgd, config.recording, total_steps)
    if config.local_sgd.sync_steps_first == 0:
        return local
    return PostLocalStrategy(SyncStrategy(context), local, config.local_sgd.sync_steps_first, context.progress)
