"""Runs a command on all ranks: they start, compare their configurations, work, and end together if one fails."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.commands.config import CommandConfig
from hvdtrain.config.fields import as_dict, flag_of
from hvdtrain.distributed import runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import RuntimeConfig
from hvdtrain.errors import HvdtrainError
from hvdtrain.fault_tolerance.collective_errors import exit_code_of, on_every_rank
from hvdtrain.fault_tolerance.config import JobWatchConfig
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.shutdown import end_job
from hvdtrain.fault_tolerance.start_watch import StartWatch
from hvdtrain.system import environment, versions
from hvdtrain.system.supervisor_client import note_exit_code

# May differ between ranks: folders and cores belong to a host.
RANK_OPTIONS = ("data_dir", "run_dir", "threads", "timeline")


ConfigT = TypeVar("ConfigT", bound=CommandConfig)


@dataclasses.dataclass(frozen=True)
class Session:
    """The ranks of a running command."""

    collectives: Collectives
    job_watch: JobWatch


def run_on_ranks(
    config: ConfigT | None,
    refused: HvdtrainError | None,
    work: Callable[[ConfigT, Session], None],
    *,
    process_sets: bool = False,
    step: Callable[[], int | None] = lambda: None,
) -> int:
    """Runs ``work`` on every rank, or reports on every rank why this one cannot.

    Args:
        config: None if this rank's command line was refused.
        refused: the reason.
        process_sets: see :func:`hvdtrain.init`.
        step: the number of steps made, for an error message.

    Returns:
        The exit code.
    """
    collectives = None
    job_watch: JobWatch | None = None
    options = RuntimeConfig() if config is None else config.runtime
    start_timeout_s = (JobWatchConfig() if config is None else config.job_watch).stall_timeout
    environment.set_gloo_timeout(start_timeout_s)
    try:
        with StartWatch(start_timeout_s):
            runtime.init(**as_dict(options), process_sets=process_sets)
            collectives = runtime.current().collectives
            accepted = on_every_rank(lambda: _accepted(config, refused), collectives)
            shared = {flag_of(name): value for name, value in as_dict(accepted).items() if name not in RANK_OPTIONS}
            facts = {**shared, **versions.versions(), "hvdtrain's code": versions.code_digest()}
            require_agreement("configuration and versions", facts, collectives)
            job_watch = JobWatch(collectives, stall_timeout_s=accepted.job_watch.stall_timeout)
            job_watch.start()
        work(accepted, Session(collectives, job_watch))
        job_watch.close(ends_process=True)
    except Exception as error:
        note_exit_code(exit_code_of(error))
        end_job(error, collectives, step(), job_watch)
    except SystemExit as end:
        # Of the task's code: this rank would end, perhaps with exit code 0, and the others wait for it.
        stopped = HvdtrainError(f"a task must not end the process. Received: sys.exit({end.code!r}). Raise an error.")
        note_exit_code(exit_code_of(stopped))
        end_job(stopped.with_traceback(end.__traceback__), collectives, step(), job_watch)
    return 0


def _accepted(config: ConfigT | None, refused: HvdtrainError | None) -> ConfigT:
    if refused is not None:
        raise refused
    assert config is not None
    return config
