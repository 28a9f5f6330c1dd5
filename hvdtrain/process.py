"""What this process is and has: launcher, cores, GPUs; the only reader of the environment.

Nothing here starts MPI or Horovod. TensorFlow is imported only by :func:`import_tensorflow`.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Lines that TensorFlow writes to stderr on every start and that no setting turns off: its absl
# logging is not initialised in Python, so TF_CPP_MIN_LOG_LEVEL is not heeded (seen with 2.21).
_CHATTER = (
    "absl::InitializeLog()",
    "oneDNN custom operations are on",
    "Could not find cuda drivers",
    "failed call to cuInit",
    "This TensorFlow binary is optimized",
    "To enable the following instructions",
    "TF-TRT Warning",
    "Unable to register cu",
)

_PROC = Path("/proc")

# Chosen by benchmarks/defaults.py; a value that the user or the site has set is never replaced.
# Open MPI polls without pause: where ranks fill the cores, Horovod's background thread took a third
# of the machine. Horovod looks for work every millisecond by default, as long as a small model's step; to
# look every 0.1 ms takes 15 % of a core, and a rank that is alone never has work for it. To look is a message
# to every other rank: where that does not leave the host and each rank has a core, it may be more often.
_MPI_DEFAULTS = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_CYCLE_MS, _CYCLE_WITHIN_HOST_MS, _CYCLE_ALONE_MS = "0.1", "0.02", "5"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Who started this process, as far as the environment tells before MPI is up."""

    name: str
    """``horovodrun --gloo``, ``Open MPI``, ``PMI`` (Slurm, MPICH, Intel MPI) or ``none``."""
    rank: int
    size: int
    """Ranks that it announced; 1 where it does not say (PMIx outside of Slurm)."""
    local_size: int | None
    """Ranks on this host; None where the launcher does not say."""
    bound_to_cores: bool
    """True when the launcher gave this rank cores of its own."""

    @property
    def is_alone(self) -> bool:
        """True for a job of one rank, as far as is known: PMI may not say how many there are."""
        return self.size == 1 and self.name != "PMI"

    @property
    def is_within_host(self) -> bool:
        """True where several ranks are known to be on one host."""
        return 1 < self.size == self.local_size


def find_launcher(env: Mapping[str, str] | None = None) -> Launcher:
    """Reads the launcher's variables (default: of this process)."""
    env = os.environ if env is None else env
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


def environment_defaults(env: Mapping[str, str], environment_root: str) -> dict[str, str]:
    """The variables to set before TensorFlow, MPI and Horovod start; never one that is set already."""
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **_MPI_DEFAULTS}
    launcher = find_launcher(env)
    if not launcher.is_alone:
        has_core_each = launcher.bound_to_cores or launcher.size <= usable_cores()
        often = launcher.is_within_host and has_core_each
        defaults["HOROVOD_CYCLE_TIME"] = _CYCLE_WITHIN_HOST_MS if often else _CYCLE_MS
    if (Path(environment_root) / "lib" / "libmpi.so.40").exists():
        # Open MPI's wheel was configured for another folder; only its mpirun finds that out by itself.
        defaults["OPAL_PREFIX"] = environment_root
    return {name: value for name, value in defaults.items() if name not in env}


def prepare_environment() -> None:
    """Sets the defaults for this process. Calling it again changes nothing."""
    os.environ.update(environment_defaults(os.environ, sys.prefix))


@contextlib.contextmanager
def horovod_start_environment(launcher: Launcher) -> Iterator[None]:
    """What Horovod is to read while it starts.

    One process without a launcher needs no MPI, and ``MPI_Init`` alone fails on many sites, so that
    Horovod starts with Gloo. The variables of a rank that is alone must not outlive the start: a launcher
    called from this process would hand them on, and each of its ranks would believe to be alone.
    """
    chosen = {"HOROVOD_CYCLE_TIME": _CYCLE_ALONE_MS} if launcher.is_alone else {}
    if launcher.name == "none":
        chosen |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


def settings() -> dict[str, str]:
    """The environment's values that decide speed, as they stand now."""
    names = [
        *_MPI_DEFAULTS,
        "HOROVOD_CYCLE_TIME",
        "HOROVOD_FUSION_THRESHOLD",
        "HOROVOD_CPU_OPERATIONS",
        "CUDA_VISIBLE_DEVICES",
    ]
    return {name: os.environ[name] for name in names if name in os.environ}


def allow_process_groups() -> None:
    """Lets groups of ranks be made after Horovod has started, at the cost of a look in each of its cycles."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


def choose_fusion(launcher: Launcher, deterministic: bool) -> None:
    """Decides whether Horovod copies messages that are ready together into one buffer; before it starts.

    Within a host to copy a message takes as long as to send it, so that each goes by itself, unless the user says
    otherwise. In deterministic mode each has to: with three or more ranks a ring adds each element in an order that
    depends on its place in the buffer, so that runs would differ in the last bit.
    """
    name = "HOROVOD_FUSION_THRESHOLD"
    if deterministic:
        os.environ[name] = "0"
    elif launcher.is_within_host and not _has_gpu():
        os.environ.setdefault(name, "0")


def computes_on_one_core() -> bool:
    """Whether this rank has one thread to compute with and no GPU: what runs beside its step only delays it."""
    import tensorflow as tf

    return bool(tf.config.threading.get_intra_op_parallelism_threads() == 1) and not _has_gpu()


def _has_gpu() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def stdout_is_terminal() -> bool:
    """True where a progress bar on this rank's stdout is drawn for a person.

    Open MPI gives each rank a terminal of its own even where all that ranks say goes to a file. What
    counts is the launcher's stdout: that of the nearest ancestor whose stdout is not this process'.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return False
    if find_launcher().name == "none":
        return True
    try:
        own = _PROC.joinpath("self/fd/1").readlink()
        ancestor = _PROC / str(os.getppid())
        while ancestor.joinpath("fd/1").readlink() == own:
            ancestor = _PROC / _parent(ancestor)
        return _is_terminal(ancestor / "fd/1") and not _tags_lines(ancestor)
    except OSError:
        # The launcher cannot be looked at: it is another user's, or stands outside of this container.
        return False


def horovodrun_above() -> int | None:
    """The ``horovodrun`` that started this process with MPI, if it runs on this host; None: none.

    It has become a shell, ``sh -c "mpirun …"``.
    """
    with contextlib.suppress(OSError):
        ancestor = _PROC / str(os.getppid())
        while ancestor.name not in ("0", "1"):
            arguments = ancestor.joinpath("cmdline").read_text(errors="replace").split("\0")
            if arguments[1:2] == ["-c"] and arguments[2].lstrip().startswith("mpirun "):
                return int(ancestor.name)
            ancestor = _PROC / _parent(ancestor)
    return None


def is_running(pid: int) -> bool:
    """False for a process that has ended, collected by its parent or not."""
    try:
        return _PROC.joinpath(str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _parent(process: Path) -> str:
    # The second field, the program's name, may hold spaces and brackets.
    return process.joinpath("stat").read_text().rpartition(")")[2].split()[1]


def _tags_lines(launcher: Path) -> bool:
    # mpirun, as horovodrun calls it: a name before each line pushes a bar out of its place.
    arguments = launcher.joinpath("cmdline").read_text(errors="replace").split("\0")
    return any(each.lstrip("-") in ("tag-output", "timestamp-output") for each in arguments)


def _is_terminal(path: Path) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where a user's files go that can be made again: by the XDG rules, in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"


def supervisor_file() -> Path | None:
    """Where a job that ``launch/run --restarts`` started tells how it fares; None for any other."""
    path = os.environ.get("HVDTRAIN_SUPERVISOR_FILE")
    return Path(path) if path else None


def restart_number() -> int:
    """How often ``launch/run --restarts`` has started this job again; 0 for its first start."""
    number = os.environ.get("HVDTRAIN_RESTART", "")
    return int(number) if number.isdecimal() else 0


def trace_reductions(path: str) -> None:
    """Has Horovod write its timeline; to be called before it starts."""
    os.environ["HOROVOD_TIMELINE"] = path


def host_name() -> str:
    """The name this host goes by."""
    return socket.gethostname()


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(cores: int, local_size: int, bound_to_cores: bool) -> int:
    """A fair share of the host's cores, at least 1."""
    return cores if bound_to_cores else max(1, cores // local_size)


def inter_op_threads(threads: int) -> int:
    """How many operations a rank runs at a time: one, where it has one thread to compute with; else at least 2."""
    return 1 if threads == 1 else max(2, math.ceil(threads / 2))


def choose_gpu(num_gpus: int, local_rank: int, local_size: int) -> int | None:
    """The GPU of a rank: by local rank; ranks beyond the number of GPUs share them in turn.

    A launcher that shows each rank only its own GPU (one visible, several ranks) is respected: the
    visible one is taken.

    Returns:
        The index among the visible GPUs, or None where there is none.
    """
    assert 0 <= local_rank < local_size
    return local_rank % num_gpus if num_gpus else None


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Holds back what is written to stderr, C++ included, then passes on all but TensorFlow's greetings."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not any(sign in line for sign in _CHATTER):
                    sys.stderr.write(line)


def import_tensorflow() -> None:
    """Imports TensorFlow and lets it look for its devices, without the dozen lines it prints there."""
    if "tensorflow" in sys.modules:
        return
    prepare_environment()
    with without_chatter():
        import tensorflow as tf

        tf.config.list_physical_devices()


def configure_devices(local_rank: int, local_size: int, threads: int | None, bound_to_cores: bool) -> str:
    """Pins this rank's GPU, lets its memory grow, and divides the host's cores among its ranks.

    Returns:
        The device this rank computes on: ``GPU:1`` or ``CPU``.
    """
    import tensorflow as tf

    gpus: Sequence[object] = tf.config.list_physical_devices("GPU")
    index = choose_gpu(len(gpus), local_rank, local_size)
    if index is not None:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    count = threads or threads_per_rank(usable_cores(), local_size, bound_to_cores)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(inter_op_threads(count))
    except RuntimeError:
        # The caller has used TensorFlow before init(): its thread pools exist and stay as they are.
        if threads is not None:
            raise
    with without_chatter():
        tf.config.list_logical_devices()
    return "CPU" if index is None else f"GPU:{index}"


def is_deterministic() -> bool:
    """True when TensorFlow refuses operations whose outcome may vary, the clock's included."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


def versions() -> dict[str, str]:
    """Of everything whose difference between ranks would change results."""
    names = ("hvdtrain", "tensorflow", "keras", "horovod", "numpy")
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


def code_digest() -> str:
    """Changes with every line of this package: a checkout can be another one on another host, of the same version."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
