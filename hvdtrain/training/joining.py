"""How the ranks of an elastic job join each other, whatever loop they train in: the trainer's or a user's own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.replica_consistency import global_stream, own_random_stream, random_streams
from hvdtrain.errors import HvdtrainError
from hvdtrain.fault_tolerance.elastic.coordinator_link import CoordinatorLink
from hvdtrain.fault_tolerance.shutdown import is_secondary
from hvdtrain.optim.global_loss import end_checks
from hvdtrain.optim.pipeline import GradientPipeline

_MAX_ATTEMPTS = 20
"""The most generations that may fail in a row while a process connects to them."""


class MembershipChange(Exception):  # noqa: N818
    """The members of the job change: the current generation is over. Raised by hvdtrain for its training loop."""


class LoopState(Protocol):
    """What the ranks of a loop have in common, and how a rank takes it over from another."""

    remedy: str
    """The remedy if the state was lost with the ranks that had it."""

    @property
    def model(self) -> keras.Model: ...

    def warm_up(self) -> None:
        """Compiles the step of a newcomer, by making one alone."""

    def undo(self) -> None:
        """Returns to the last complete step, and ends what runs in the background."""

    def place(self, *, has_state: bool) -> tuple[Any, ...]:
        """How far this rank has come, for comparison with others; ``has_state`` comes first."""

    def shared(self) -> Any:
        """What the rank with the most progress sends to all; picklable."""

    def keeps_own(self, places: Sequence[tuple[Any, ...]], own: int, source: int) -> bool:
        """Whether the state of rank ``own`` stays complete even if :meth:`take_over` fails halfway."""

    def take_over(self, places: Sequence[tuple[Any, ...]], source: int, shared: Any) -> None:
        """Takes over the state of the rank with the most progress. All ranks must call it.

        Args:
            places: those of all ranks.
            source: the rank with the most progress.
            shared: what it has sent.
        """

    def resume(self, shared: Any) -> None:
        """Prepares for the next step with these ranks."""


class Joining:
    """Joins the other ranks of an elastic job, each time that they change.

    Args:
        state: of the loop.
        on_leave: called before this process, which leaves the job, ends.
    """

    def __init__(
        self,
        state: LoopState,
        coordinator: CoordinatorLink,
        collectives: ElasticCollectives,
        *,
        on_leave: Callable[[], None] = lambda: None,
    ):
        self._state = state
        self._coordinator = coordinator
        self._collectives = collectives
        self._on_leave = on_leave
        self.is_newcomer = coordinator.must_warm_up
        """Whether this process joins a job that trains already, and has not done so yet."""
        self._has_state = not coordinator.must_warm_up

    def start(self) -> None:
        """From now on, ranks may change. A newcomer compiles its step alone, and must rejoin next."""
        self._coordinator.cut_with(self._collectives.cut)
        if self.is_newcomer:
            self._state.warm_up()
            # Its own streams, as ranks have from the start: see replica_consistency.broadcast.
            for stream in [*random_streams(self._state.model), global_stream()]:
                stream.assign(own_random_stream(stream.numpy(), self._coordinator.number))
            self._coordinator.is_ready()

    def is_over(self, error: Exception) -> bool:
        """Whether an error was caused by a change of ranks."""
        return isinstance(error, MembershipChange) or (is_secondary(error) and self._coordinator.wait_for_cut())

    def rejoin(self) -> None:
        """Holds, connects to the ranks of the next generation, and synchronizes with them; ends this process if it
        leaves.

        If a rank is lost meanwhile, the others do it again.
        """
        attempt = 0
        while True:
            generation = self._coordinator.next_generation()
            if generation is None:
                self._collectives.leave()
                self._on_leave()
                self._coordinator.exit()
            place = dataclasses.asdict(generation.place(self._coordinator.number))
            rendezvous = generation.address, generation.port
            # Before there are other ranks: what runs in the background must not reduce over them.
            self._state.undo()
            try:
                self._collectives.restart(place, self._coordinator.interface, rendezvous)
                self.settle()
                return
            except Exception as error:
                # Another member was lost meanwhile, or something is wrong and a retry will not help.
                attempt += 1
                if attempt == _MAX_ATTEMPTS or not self.is_over(error):
                    raise

    def settle(self) -> None:
        """Gives all ranks the state of the rank with the most progress. All ranks must call it."""
        state, collectives = self._state, self._collectives
        places: list[tuple[Any, ...]] = collectives.allgather(tuple(state.place(has_state=self._has_state)))
        source = places.index(max(places))
        if not places[source][0]:
            raise HvdtrainError(f"the state of the run was lost with the ranks that had it. {state.remedy}")
        is_source = collectives.rank == source
        shared = collectives.allgather(state.shared() if is_source else None)[source]
        # A partially received state is invalid.
        self._has_state = is_source or state.keeps_own(places, collectives.rank, source)
        state.take_over(places, source, shared)
        self.is_newcomer, self._has_state = False, True
        end_checks()
        state.resume(shared)


def without_comparison(pipelines: Sequence[tuple[Any, GradientPipeline]]) -> list[tuple[Any, GradientPipeline]]:
    """The pipelines of a model, without the comparison of replicas in the first step.

    They are equal, and the comparison would wait for newcomers, which make their first step alone.
    """
    return [(leaf, dataclasses.replace(pipeline, start=None)) for leaf, pipeline in pipelines]
