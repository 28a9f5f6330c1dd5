"""The coordinator of an elastic job, on a thread of the test."""

import threading

from hvdtrain.fault_tolerance.elastic.coordinator import Coordinator
from hvdtrain.fault_tolerance.elastic.membership import Membership


class CoordinatedJob:
    """A coordinator with what it says and removes."""

    def __init__(self, membership: Membership, **options):
        self.said: list[str] = []
        self.removed: list[int] = []
        options = {
            "token": "secret",
            "start_size": membership.maximum,
            "timeout_s": 60,
            "endpoint": ("127.0.0.1", 0),
            **options,
        }
        self.coordinator = Coordinator(membership, say=self.said.append, on_removed=self.removed.append, **options)
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            self.coordinator.poll(0.01)

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.coordinator.close()
