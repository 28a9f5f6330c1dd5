"""The launcher that started this process, as described by environment variables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Launcher:
    """What the environment says about the job before MPI is initialized."""

    name: str
    """As in the table below; ``PMI`` (Slurm, MPICH, Intel MPI); ``none``."""
    rank: int
    size: int
    """Number of ranks announced by the launcher; 1 if it announces none (PMIx outside of Slurm, Cray PALS)."""
    local_size: int | None
    """Ranks on this host; None if the launcher does not say."""
    bound_to_cores: bool
    """Whether the launcher bound this rank to its own cores."""
    has_one_command: bool = False
    """Whether all ranks are known to have the same command line."""

    @property
    def is_single_rank(self) -> bool:
        """Whether the job has one rank, as far as is known: PMI may not announce the number."""
        return self.size == 1 and self.name not in _WITHOUT_SIZE

    @property
    def fewest_ranks(self) -> int:
        """The number of ranks that the job has at least, by all that the launcher announces."""
        return max(self.size, self.local_size or 1, self.rank + 1)

    @property
    def starts_gloo(self) -> bool:
        """Whether Horovod starts without MPI."""
        return self.name in ("none", "horovodrun --gloo")

    @property
    def is_one_host(self) -> bool:
        """Whether several ranks are known to share one host."""
        return 1 < self.size == self.local_size


class _Variables(NamedTuple):
    """The variables that a launcher sets; the first that is set counts."""

    name: str
    rank: Sequence[str]
    size: Sequence[str]
    local_size: Sequence[str]
    needs_size: bool = False
    """Whether the rank alone does not show that it is this launcher."""


_LAUNCHERS = (
    _Variables("horovodrun --gloo", ["HOROVOD_RANK"], ["HOROVOD_SIZE"], ["HOROVOD_LOCAL_SIZE"]),
    _Variables("Open MPI", ["OMPI_COMM_WORLD_RANK"], ["OMPI_COMM_WORLD_SIZE"], ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
    _Variables("MVAPICH", ["MV2_COMM_WORLD_RANK"], ["MV2_COMM_WORLD_SIZE"], ["MV2_COMM_WORLD_LOCAL_SIZE"]),
    _Variables("Cray PALS", ["PALS_RANKID"], [], ["PALS_LOCAL_SIZE"]),
    _Variables("IBM JSM", ["JSM_NAMESPACE_RANK"], ["JSM_NAMESPACE_SIZE"], ["JSM_NAMESPACE_LOCAL_SIZE"]),
    _Variables("Flux", ["FLUX_TASK_RANK"], ["FLUX_JOB_SIZE"], [], needs_size=True),
    _Variables("PMI", ["PMI_RANK", "PMIX_RANK"], ["PMI_SIZE", "SLURM_STEP_NUM_TASKS"], ["MPI_LOCALNRANKS"]),
    _Variables("Intel MPI", ["MPI_LOCALRANKID"], [], ["MPI_LOCALNRANKS"]),
    _Variables("Slurm", ["SLURM_PROCID"], ["SLURM_STEP_NUM_TASKS"], ["SLURM_STEP_TASKS_PER_NODE"], needs_size=True),
    _Variables("torchrun", ["RANK"], ["WORLD_SIZE"], ["LOCAL_WORLD_SIZE"], needs_size=True),
)
_WITHOUT_SIZE = ("PMI", "Cray PALS", "Intel MPI")


def find_launcher(env: Mapping[str, str]) -> Launcher:
    """Recognizes the launcher by the variables it sets."""
    bound = "OMPI_MCA_orte_bound_at_launch" in env or "SLURM_CPUS_PER_TASK" in env

    def number(names: Sequence[str]) -> int | None:
        return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)

    for each in _LAUNCHERS:
        rank, size = number(each.rank), number(each.size)
        if rank is not None and (size is not None or not each.needs_size):
            one = each.name == "horovodrun --gloo" or env.get("OMPI_NUM_APP_CTX") == "1"
            return Launcher(each.name, rank, size or 1, number(each.local_size), bound, has_one_command=one)
    return Launcher("none", 0, 1, 1, False)


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started by a rank, and trains alone."""
    own = {name for each in _LAUNCHERS for names in (each.rank, each.size, each.local_size) for name in names}
    return {
        name: value
        for name, value in env.items()
        if name not in own and not name.startswith(("OMPI_", "PMI", "HOROVOD_"))
    }
