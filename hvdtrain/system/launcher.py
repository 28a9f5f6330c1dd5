"""The launcher that started this process, as described by environment variables."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Launcher:
    """What the environment says about the job before MPI is initialized."""

    name: str
    """``horovodrun --gloo``, ``Open MPI``, ``PMI`` (Slurm, MPICH, Intel MPI) or ``none``."""
    rank: int
    size: int
    """Number of ranks announced by the launcher; 1 if it announces none (PMIx outside of Slurm)."""
    local_size: int | None
    """Ranks on this host; None if the launcher does not say."""
    bound_to_cores: bool
    """Whether the launcher bound this rank to its own cores."""

    @property
    def is_single_rank(self) -> bool:
        """Whether the job has one rank, as far as is known: PMI may not announce the number."""
        return self.size == 1 and self.name != "PMI"

    @property
    def is_one_host(self) -> bool:
        """Whether several ranks are known to share one host."""
        return 1 < self.size == self.local_size


def find_launcher(env: Mapping[str, str]) -> Launcher:
    """Recognizes the launcher by the variables it sets."""
    bound = "OMPI_MCA_orte_bound_at_launch" in env or "SLURM_CPUS_PER_TASK" in env

    def number(*names: str) -> int | None:
        return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)

    for name, rank_names, size_names, local_size_names in (
        ("horovodrun --gloo", ["HOROVOD_RANK"], ["HOROVOD_SIZE"], ["HOROVOD_LOCAL_SIZE"]),
        ("Open MPI", ["OMPI_COMM_WORLD_RANK"], ["OMPI_COMM_WORLD_SIZE"], ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        ("PMI", ["PMI_RANK", "PMIX_RANK"], ["PMI_SIZE", "SLURM_STEP_NUM_TASKS"], ["MPI_LOCALNRANKS"]),
        ("Slurm", ["SLURM_PROCID"], ["SLURM_STEP_NUM_TASKS"], ["SLURM_STEP_TASKS_PER_NODE"]),
    ):
        rank = number(*rank_names)
        if rank is not None and (name != "Slurm" or number(*size_names) is not None):
            return Launcher(name, rank, number(*size_names) or 1, number(*local_size_names), bound)
    return Launcher("none", 0, 1, 1, False)
