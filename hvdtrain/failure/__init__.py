"""How a job ends before its time: by an error, by a signal, or because a rank is lost."""

from hvdtrain.failure.channel import host_addresses
from hvdtrain.failure.ending import (
    JobError,
    describe,
    end_job,
    exit_code_of,
    on_every_rank,
    on_first_rank,
    tell,
)
from hvdtrain.failure.watch import JobWatch

__all__ = [
    "JobError",
    "JobWatch",
    "describe",
    "end_job",
    "exit_code_of",
    "host_addresses",
    "on_every_rank",
    "on_first_rank",
    "tell",
]
