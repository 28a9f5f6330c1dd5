"""How a member of an elastic job continues with other ranks."""

import dataclasses
from collections.abc import Callable

from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.fault_tolerance.elastic.coordinator_link import CoordinatorLink
from hvdtrain.fault_tolerance.shutdown import is_secondary

_MAX_ATTEMPTS = 20
"""How many generations may fail one after the other while a process connects to them."""


class MembershipChange(Exception):  # noqa: N818
    """The members of the job change: the current generation is over. Raised by hvdtrain for its training loop."""


def is_over(error: Exception, coordinator: CoordinatorLink) -> bool:
    """Whether an error means that the ranks change."""
    return isinstance(error, MembershipChange) or (is_secondary(error) and coordinator.wait_for_cut())


def rejoin(
    coordinator: CoordinatorLink,
    collectives: ElasticCollectives,
    *,
    settle: Callable[[], None],
    on_leave: Callable[[], None],
) -> None:
    """Holds, connects to the ranks of the next generation, and settles with them; ends this process if it leaves.

    Args:
        settle: makes the state of all ranks that of the furthest one. Called again if a rank is lost meanwhile.
        on_leave: called before this process, which leaves the job, ends.
    """
    attempt = 0
    while True:
        generation = coordinator.next_generation()
        if generation is None:
            collectives.leave()
            on_leave()
            coordinator.exit()
        place = dataclasses.asdict(generation.place(coordinator.number))
        try:
            collectives.restart(place, coordinator.interface, (generation.address, generation.port))
            settle()
            return
        except Exception as error:
            # Another member was lost meanwhile, or something is wrong that no other members will mend.
            attempt += 1
            if attempt == _MAX_ATTEMPTS or not is_over(error, coordinator):
                raise
