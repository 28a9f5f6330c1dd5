"""What a strategy is: how the ranks of a run train together."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import keras

from hvdtrain.checkpoint.model_state import Averaged
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.training.progress import Progress
from hvdtrain.training.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class StrategyContext:
    """What a strategy works on."""

    model: keras.Model
    plan: Callable[[], SamplePlan]
    """Returns the current assignment of samples, which changes with the ranks."""
    progress: Progress
    feed: TrainingFeed
    train_step: TrainStep
    collectives: Collectives
    job_watch: JobWatch


class Place(NamedTuple):
    """How far a rank has come. Places compare by progress."""

    has_state: bool
    step: int
    is_between_calls: bool
    is_logged: bool
    rounds: int
    """Completed averages of parameters; 0 in sync mode."""
    steps_in_round: int
    """Steps since the last average; 0 in sync mode."""


class Strategy(Protocol):
    """Makes steps, and synchronizes the model over ranks."""

    mode: str
    """``sync`` or ``local``, for the summary."""
    marks: tuple[int, ...]
    """Steps after which a call has to end."""
    in_lockstep: bool
    """Whether ranks make every step together, so that their step times can be compared."""
    ranks_are_independent: bool
    """Whether each rank trains its own replica, so that per-rank results can differ."""
    waits_for_ranks: bool = True
    """Whether ranks may wait for each other between their steps, for a log line for example."""

    @property
    def makes_common_steps(self) -> bool:
        """Whether steps of all ranks are meant to be those of one process. By default, they are."""
        return True

    def start(self) -> None:
        """Call it before the first step, when replicas are equal or restored."""

    def run(self, max_steps: int) -> None:
        """Makes one call of steps, at most ``max_steps``, and counts them."""

    def synchronized(self) -> AbstractContextManager[None]:
        """Inside the block, the model holds synchronized values; all ranks must enter it."""

    def compare_replicas(self) -> None:
        """Raises DivergenceError if replicas differ that must be equal; all ranks must call it."""

    def finish(self) -> None:
        """Finalizes training after the last step; averaged weights stay in the model."""

    @property
    def updates(self) -> int:
        """How often the weights were updated."""

    def total(self, own: int) -> int:
        """A count of the run from this rank's count; all ranks must call it.

        By default the same, because replicas are equal.
        """
        return own

    @property
    def averaged(self) -> Averaged | None:
        """If each rank trains its own replica: a context in which the model holds averaged values."""

    @property
    def bytes_reduced(self) -> int:
        """Bytes that this rank has passed to an allreduce."""

    def close(self) -> None:
        """Call it when training ends, also with an error: ends what runs in the background. By default, nothing."""
        return

    def gauges(self) -> dict[str, float]:
        """The strategy's part of a log line; all ranks call it. By default, nothing."""
        return {}

    def warnings(self) -> list[str]:
        """Warnings since the last call, the same on all ranks. By default, none."""
        return []

    def summary(self) -> dict[str, Any]:
        """The strategy's part of a run's ``summary.json``."""

    @property
    def position(self) -> tuple[int, int]:
        """The number of completed averages of parameters, and of steps since the last one. By default, none."""
        return 0, 0

    def settle(self) -> None:
        """Ends what runs in the background, on this rank alone: the collectives have been cut, or are idle.

        By default, nothing.
        """
        return

    def end_round(self) -> None:
        """Averages now, because some ranks are leaving. All ranks must call it.

        By default, nothing.
        """
        return

    def keeps_own(self, place: Place, furthest: Place) -> bool:
        """Whether the state of a rank stays complete even if :meth:`take_over` fails halfway."""
        return False

    def take_over(self, places: Sequence[Place], source: int, num_lost: int) -> None:
        """Continues with the replica of the rank with the most progress. All ranks must call it.

        Args:
            places: the places of all ranks.
            source: the rank with the most progress.
            num_lost: the number of ranks that were lost.
        """
        raise AssertionError(f"the ranks of {type(self).__name__} do not change")

    def state(self) -> dict[str, Any] | None:
        """The state to save in a checkpoint that is common to all ranks."""

    def rank_state(self) -> dict[str, Any] | None:
        """The state of this rank to save in a checkpoint, in addition to its variables."""

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        """Restores what these returned; ``rank_state`` is None if the number of ranks has changed."""
