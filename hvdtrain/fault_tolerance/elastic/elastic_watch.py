"""The job watch of a process of an elastic job, and how it starts."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.admission import Admission, request_admission
from hvdtrain.fault_tolerance.elastic.coordinator_link import CoordinatorLink
from hvdtrain.fault_tolerance.elastic.generation import ALONE
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import environment


class ElasticWatch(JobWatch):
    """A job watch that follows the coordinator, instead of watching the other ranks.

    Args:
        admission: the connection to the coordinator, which has accepted this process.
        stall_timeout_s: see :class:`JobWatch`.
    """

    def __init__(self, admission: Admission, *, stall_timeout_s: float):
        super().__init__(stall_timeout_s=stall_timeout_s)
        self.coordinator = CoordinatorLink(
            admission,
            stop_point=self._stop_point,
            position=lambda: self._position,
            exit_actions=self._run_exit_actions,
            stall_timeout_s=stall_timeout_s,
        )

    def start(self) -> None:
        """Starts to follow the coordinator."""
        self.monitor = self.coordinator
        self.coordinator.start()


def join_elastic_job(facts: Mapping[str, Any], stall_timeout_s: float) -> ElasticWatch:
    """Joins the job that the environment names. Before the first generation, waits for it, and takes a place in it.

    Args:
        facts: what must be equal in all processes.
        stall_timeout_s: how long a process may be silent; 0: forever.

    Raises:
        UsageError: the environment names no place to connect to.
        DisagreementError, StoppedEarly, HvdtrainError: see :func:`request_admission`.
    """
    endpoint, token = environment.elastic_job() or ("", "")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"HVDTRAIN_ELASTIC must be host:port. Received: {endpoint!r}")
    # As in the channel: what cannot be written as JSON is compared as text.
    plain = json.loads(json.dumps(dict(facts), default=str))
    admission = request_admission((host, int(port)), token, plain, stall_timeout_s=stall_timeout_s)
    watch = ElasticWatch(admission, stall_timeout_s=stall_timeout_s)
    watch.start()
    environment.note_joined()
    interface = watch.coordinator.interface
    if admission.must_warm_up:
        # Even if a launcher such as Slurm's srun has started this process: it is alone until it joins.
        environment.set_place(dataclasses.asdict(ALONE), interface)
        return watch
    generation = watch.coordinator.next_generation()
    if generation is None:
        raise StoppedEarly("this process was asked to leave before training began.")
    place = dataclasses.asdict(generation.place(watch.coordinator.number))
    environment.set_place(place, interface, (generation.address, generation.port))
    return watch
