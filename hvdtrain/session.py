"""A command on all ranks: they start, compare what they were asked for, work, and end together where one fails."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain import process, replicas, runtime
from hvdtrain.config import Config, flag_of
from hvdtrain.errors import HvdtrainError
from hvdtrain.failure import JobWatch, end_job, exit_code_of, on_every_rank
from hvdtrain.supervised import note_exit_code

Asked = TypeVar("Asked", bound=Config)

# May differ between ranks: folders and cores are a host's own.
OWN_TO_A_RANK = ("data_dir", "run_dir", "threads", "timeline")


def run_on_ranks(
    config: Asked | None,
    refused: HvdtrainError | None,
    start: Callable[[], object],
    work: Callable[[Asked, JobWatch], None],
    *,
    step: Callable[[], int | None] = lambda: None,
) -> int:
    """Runs ``work`` on every rank, or tells every rank why this one cannot.

    Args:
        config: None where this rank's command line was refused.
        refused: why.
        start: calls ``runtime.init``.
        step: how far the work has come, where it fails.

    Returns:
        The exit code.
    """
    collectives = None
    watch: JobWatch | None = None
    try:
        start()
        collectives = runtime.current().collectives
        asked = on_every_rank(lambda: _accepted(config, refused), collectives)
        shared = {flag_of(name): value for name, value in asked.as_dict().items() if name not in OWN_TO_A_RANK}
        facts = {**shared, **process.versions(), "hvdtrain's code": process.code_digest()}
        replicas.require_agreement("configuration and versions", facts, collectives)
        watch = JobWatch(collectives, stall_timeout_s=asked.stall_timeout)
        watch.start()
        work(asked, watch)
        watch.close()
    except Exception as error:
        note_exit_code(exit_code_of(error))
        end_job(error, collectives, step(), watch)
    return 0


def _accepted(config: Asked | None, refused: HvdtrainError | None) -> Asked:
    if refused is not None:
        raise refused
    assert config is not None
    return config
