"""Runs a command on all ranks: they start, compare their configurations, work, and end together if one fails."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.commands.config import CommandConfig
from hvdtrain.config.fields import as_dict
from hvdtrain.config.wording import flag_of
from hvdtrain.distributed import runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import RuntimeConfig
from hvdtrain.errors import EndOfCheckedSteps, HvdtrainError, UsageError
from hvdtrain.fault_tolerance.collective_errors import exit_code_of, on_every_rank
from hvdtrain.fault_tolerance.config import JobWatchConfig
from hvdtrain.fault_tolerance.elastic.coordinator_link import CoordinatorLink
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch, join_elastic_job
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.shutdown import end_job, is_secondary
from hvdtrain.fault_tolerance.start_watch import StartWatch
from hvdtrain.system import environment, versions
from hvdtrain.system.supervisor_client import note_exit_code

# May differ between ranks: folders and cores belong to a host.
RANK_OPTIONS = ("data_dir", "run_dir", "threads", "timeline", "join")


ConfigT = TypeVar("ConfigT", bound=CommandConfig)


@dataclasses.dataclass(frozen=True)
class Session:
    """The ranks of a running command."""

    collectives: Collectives
    job_watch: JobWatch

    @property
    def coordinator(self) -> CoordinatorLink | None:
        """The coordinator of an elastic job; None in others."""
        return self.job_watch.coordinator if isinstance(self.job_watch, ElasticWatch) else None

    @property
    def rank(self) -> int:
        """This process's rank at the start; not 0 for a newcomer, which is alone until it joins the others."""
        if self.coordinator is not None and self.coordinator.must_warm_up:
            return self.coordinator.number
        return self.collectives.rank


def run_on_ranks(
    config: ConfigT | None,
    refused: HvdtrainError | None,
    work: Callable[[ConfigT, Session], None],
    *,
    process_sets: bool = False,
    ranks_may_change: bool = False,
    step: Callable[[], int | None] = lambda: None,
) -> int:
    """Runs ``work`` on every rank, or reports on every rank why this one cannot.

    Args:
        config: None if this rank's command line was refused.
        refused: the reason.
        process_sets: see :func:`hvdtrain.init`.
        ranks_may_change: whether ``work`` can continue with other ranks, as in an elastic job.
        step: the number of steps made, for an error message.

    Returns:
        The exit code.
    """
    job_watch: JobWatch | None = None
    options = RuntimeConfig() if config is None else config.runtime
    start_timeout_s = (JobWatchConfig() if config is None else config.job_watch).stall_timeout
    environment.set_gloo_timeout(start_timeout_s)
    try:
        if config is not None and config.job_watch.join is not None:
            environment.join_elastic_job(config.job_watch.join)
        if environment.elastic_job() is not None:
            accepted = _accepted(config, refused)
            if not ranks_may_change:
                raise UsageError("elastic jobs train. Received: another command. Start it by horovodrun or mpirun.")
            job_watch = join_elastic_job(_facts(accepted), accepted.job_watch.stall_timeout)
            _start_runtime(options, process_sets)
            collectives = runtime.current().collectives
        else:
            with StartWatch(start_timeout_s):
                _start_runtime(options, process_sets)
                collectives = runtime.current().collectives
                accepted = on_every_rank(lambda: _accepted(config, refused), collectives)
                require_agreement("configuration and versions", _facts(accepted), collectives)
                job_watch = JobWatch(collectives, stall_timeout_s=accepted.job_watch.stall_timeout)
                job_watch.start()
        work(accepted, Session(collectives, job_watch))
        job_watch.close(ends_process=True)
    except Exception as error:
        if isinstance(job_watch, ElasticWatch) and is_secondary(error) and job_watch.coordinator.wait_for_cut():
            # Before the first step or after the last, where ranks cannot change.
            job_watch.coordinator.restart_all()
        note_exit_code(exit_code_of(error))
        end_job(error, runtime.collectives(), step(), job_watch)
    except EndOfCheckedSteps as end:
        return int(str(end.code))
    except SystemExit as end:
        # Raised by the task's code: this rank would end, perhaps with exit code 0, while the others wait for it.
        stopped = HvdtrainError(f"a task must not end the process. Received: sys.exit({end.code!r}). Raise an error.")
        note_exit_code(exit_code_of(stopped))
        end_job(stopped.with_traceback(end.__traceback__), runtime.collectives(), step(), job_watch)
    return 0


def _start_runtime(options: RuntimeConfig, process_sets: bool) -> None:
    runtime.init(
        threads=options.threads,
        deterministic=options.deterministic,
        timeline=options.timeline,
        process_sets=process_sets,
        gpus=options.gpus,
    )


def _facts(config: CommandConfig) -> dict[str, object]:
    """What must be equal on all ranks."""
    shared = {flag_of(name): value for name, value in as_dict(config).items() if name not in RANK_OPTIONS}
    return {**shared, **versions.versions(), "hvdtrain's code": versions.code_digest()}


def _accepted(config: ConfigT | None, refused: HvdtrainError | None) -> ConfigT:
    if refused is not None:
        raise refused
    assert config is not None
    return config
