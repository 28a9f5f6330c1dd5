"""Environment variables. The only module that reads or sets them; nothing here starts MPI or Horovod."""

import contextlib
import math
import os
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.system.cores import usable_cores
from hvdtrain.system.launcher import Launcher, find_launcher, without_launcher

# Chosen by benchmarks/defaults.py; a value that the user or the site has set is never replaced.
# Open MPI busy-polls: where ranks fill the cores, Horovod's background thread took a third of the
# machine. While a rank has gradients to reduce, Horovod's background thread runs a cycle every millisecond by default,
# which is as long as a small model's step. Each cycle sends a message to every other rank: on one host with a core per
# rank the cycle can be shorter than elsewhere.
_MPI_DEFAULTS = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_CYCLE_MS, _CYCLE_ONE_HOST_MS = "0.1", "0.02"
# Horovod's own default.
_STALL_CHECK_S = 60.0
_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
ONLY_CHECK = "HVDTRAIN_ONLY_CHECK"
"""Set by ``hvdtrain check``, to a file to create when a step was compared: a program ends after those steps."""


def get(name: str) -> str | None:
    """The value of a variable; None if it is not set."""
    return os.environ.get(name)


def launcher() -> Launcher:
    """The launcher of this process."""
    return find_launcher(os.environ)


def only_checks() -> bool:
    """Whether this program was started by ``hvdtrain check``."""
    return get(ONLY_CHECK) is not None


def environment_defaults(env: Mapping[str, str], environment_root: str) -> dict[str, str]:
    """The variables to set before TensorFlow, MPI and Horovod start; never one that is set already."""
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **_MPI_DEFAULTS}
    started_by = find_launcher(env)
    if not started_by.is_single_rank:
        has_core_per_rank = started_by.bound_to_cores or started_by.size <= usable_cores()
        is_fast = started_by.is_one_host and has_core_per_rank
        defaults["HOROVOD_CYCLE_TIME"] = _CYCLE_ONE_HOST_MS if is_fast else _CYCLE_MS
    if started_by.name == "Open MPI" and started_by.size == started_by.local_size:
        # Shared memory only: otherwise each rank listens on all interfaces, for connections that nobody makes.
        defaults["OMPI_MCA_btl"] = "^tcp"
    if (Path(environment_root) / "lib" / "libmpi.so.40").exists():
        # Open MPI's wheel was configured for another prefix; only its mpirun works that out.
        defaults["OPAL_PREFIX"] = environment_root
    return {name: value for name, value in defaults.items() if name not in env}


def prepare_environment() -> None:
    """Sets the defaults for this process. Calling it again changes nothing."""
    os.environ.update(environment_defaults(os.environ, sys.prefix))


def set_provider_folder(folder: Path) -> None:
    """Names the folder where libfabric looks for those who send for it (TCP, InfiniBand), if none is named."""
    os.environ.setdefault("FI_PROVIDER_PATH", str(folder))


def launch_environment() -> dict[str, str]:
    """The environment for a launcher that this process starts."""
    env = dict(os.environ)
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    # Where the environment of this Python was not activated, its mpirun and its python are not on PATH.
    scripts = sysconfig.get_path("scripts")
    if os.path.realpath(scripts) not in map(os.path.realpath, folders):
        folders.insert(0, scripts)
    env["PATH"] = os.pathsep.join(folders)
    env.setdefault("PYTHONHASHSEED", "0")  # Otherwise, sets of strings have another order on each rank.
    if os.geteuid() == 0:
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **env}
    return env


def lone_process_environment() -> dict[str, str]:
    """The environment for a process that this rank starts, which is no rank of its job."""
    of_job = ("HVDTRAIN_ELASTIC", "HVDTRAIN_SUPERVISOR", "HVDTRAIN_RESTART")
    return {name: value for name, value in without_launcher(os.environ).items() if not name.startswith(of_job)}


@contextlib.contextmanager
def horovod_start_environment(started_by: Launcher) -> Iterator[None]:
    """The variables that Horovod reads while it starts.

    A process without a launcher needs no MPI, and ``MPI_Init`` without a launcher fails on many sites, so
    Horovod starts with Gloo there. The variables of a single rank must not outlive the start: a launcher
    called from this process would pass them on, and each of its ranks would start as a job of one rank.
    """
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"} if started_by.name == "none" else {}
    chosen = {name: value for name, value in alone.items() if name not in os.environ}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


def performance_settings() -> dict[str, str]:
    """The variables that affect speed, as they are set now."""
    names = [
        *_MPI_DEFAULTS,
        "TF_ENABLE_ONEDNN_OPTS",
        "HOROVOD_CYCLE_TIME",
        _FUSION_THRESHOLD,
        "HOROVOD_CPU_OPERATIONS",
        "CUDA_VISIBLE_DEVICES",
    ]
    return {name: os.environ[name] for name in names if name in os.environ}


def enable_dynamic_process_sets() -> None:
    """Allows process sets to be added after Horovod has started; costs a check in each of its cycles."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"


def set_gloo_timeout(stall_timeout_s: float) -> None:
    """Keeps Gloo from ending a job before the stall timeout (0: never); call it before Horovod starts."""
    # Gloo's own error names no rank, and by default comes when ranks have waited for 30 s for one that has not started
    # or is suspended.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(stall_timeout_s or 86400) + 60))


def set_gloo_timeout_of_restarts(ranks: int) -> None:
    """Limits how long Gloo waits for a rank in an elastic job; call it before Horovod starts again.

    A collective that begins while its connections are cut may miss that (Gloo waits for an event that has happened).
    A rank that is suspended for longer costs the others another generation, but changes no result.
    """
    # Each rank connects to every other one, and the ranks of a host share its cores.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(max(3, math.ceil(ranks / 4)))


def enable_timeline(path: str) -> None:
    """Makes Horovod write its timeline to a file; call it before Horovod starts."""
    os.environ["HOROVOD_TIMELINE"] = path


def elastic_job() -> tuple[str, str] | None:
    """Where the coordinator of an elastic job listens, ``host:port``, and the job's token; None in other jobs."""
    endpoint = os.environ.get("HVDTRAIN_ELASTIC")
    return None if not endpoint else (endpoint, os.environ.get("HVDTRAIN_ELASTIC_TOKEN", ""))


def elastic_token() -> str | None:
    """The token of an elastic job, if it was set when the job was started."""
    return os.environ.get("HVDTRAIN_ELASTIC_TOKEN")


def elastic_variables(endpoint: str, token: str, worker: int) -> dict[str, str]:
    """The variables that make a process a member of an elastic job, whose coordinator listens at ``endpoint``,
    ``host:port``."""
    return {"HVDTRAIN_ELASTIC": endpoint, "HVDTRAIN_ELASTIC_TOKEN": token, "HVDTRAIN_ELASTIC_WORKER": str(worker)}


def elastic_worker() -> int | None:
    """The number of the worker that this process belongs to; None if ``hvdtrain elastic`` has not started it."""
    number = os.environ.get("HVDTRAIN_ELASTIC_WORKER", "")
    return int(number) if number.isdecimal() else None


def join_elastic_job(endpoint: str) -> None:
    """Makes this process a member of an elastic job."""
    os.environ["HVDTRAIN_ELASTIC"] = endpoint


def note_joined() -> None:
    """Notes that this process follows the coordinator of its elastic job."""
    os.environ["HVDTRAIN_ELASTIC_JOINED"] = str(os.getpid())


def has_joined() -> bool:
    """Whether this process follows the coordinator of its elastic job."""
    return os.environ.get("HVDTRAIN_ELASTIC_JOINED") == str(os.getpid())


def stall_check_s() -> float:
    """After how many seconds without progress a rank is reported, as Horovod's users set it; 0: never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0.0
    try:
        return max(0.0, float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "")))
    except ValueError:
        return _STALL_CHECK_S


def set_place(place: Mapping[str, int], interface: str, rendezvous: tuple[str, int] | None = None) -> None:
    """Sets the place of this rank in a job over Gloo, which Horovod reads at each start.

    Args:
        place: ``rank``, ``size``, ``local_rank``, ``local_size``, ``cross_rank`` and ``cross_size``.
        interface: the network interface that leads to the other ranks, unless the user has set one.
        rendezvous: its address and port; None: this process is the only rank.
    """
    os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
    variables = {name.upper(): str(value) for name, value in place.items()}
    variables |= {"HOSTNAME": socket.gethostname(), "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    os.environ.update({f"HOROVOD_{name}": value for name, value in variables.items()})
    if rendezvous is not None:
        set_rendezvous(rendezvous)


def place() -> dict[str, int]:
    """What :func:`set_place` has set."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return {name: int(os.environ[f"HOROVOD_{name.upper()}"]) for name in names}


def set_rendezvous(rendezvous: tuple[str, int], token: str = "") -> None:
    """Sets the address and port at which Horovod asks for the addresses of the other ranks, and the token it sends."""
    os.environ["HOROVOD_RENDEZVOUS_TOKEN"] = token
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = rendezvous[0]
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(rendezvous[1])


def rendezvous() -> tuple[str, int] | None:
    """That address and port; None if this process is the only rank."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return None if address is None else (address, int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))


def choose_settings_for_restarts(*, deterministic: bool) -> None:
    """Keeps a second start of Horovod in this process from crashing; call it before the first.

    It crashes (0.28.1) if both of these are set: Horovod writes their values into an empty vector.
    """
    # What is lost with a member is reported by the coordinator, in one line.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
    if deterministic:
        os.environ[_FUSION_THRESHOLD] = "0"
        os.environ.pop("HOROVOD_CYCLE_TIME", None)
    else:
        os.environ.pop(_FUSION_THRESHOLD, None)
        os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_MS)


def choose_fusion(started_by: Launcher, *, deterministic: bool, has_gpu: bool) -> None:
    """Decides whether Horovod fuses tensors that are ready at the same time; call it before Horovod starts.

    On one host, copying a tensor into the fusion buffer takes as long as sending it, so fusion is off
    unless the user says otherwise. In deterministic mode it must be off: with three or more ranks a ring
    sums each element in an order that depends on its place in the buffer, so the last bit would vary.
    """
    if deterministic:
        os.environ[_FUSION_THRESHOLD] = "0"
    elif started_by.is_one_host and not has_gpu:
        os.environ.setdefault(_FUSION_THRESHOLD, "0")


def cache_dir() -> Path:
    """The folder for files that can be recreated: by the XDG rules, in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"


def store_cache_dir() -> Path:
    """Where local copies of runs and data in object stores go."""
    return Path(os.environ.get("HVDTRAIN_STORE_CACHE") or cache_dir() / "stores")


def supervisor_file() -> Path | None:
    """The file through which a job reports to ``launch/run --restarts``; None without a supervisor."""
    path = os.environ.get("HVDTRAIN_SUPERVISOR_FILE")
    return Path(path) if path else None


def restart_number() -> int:
    """How often ``launch/run --restarts`` has restarted this job; 0 for its first start."""
    number = os.environ.get("HVDTRAIN_RESTART", "")
    return int(number) if number.isdecimal() else 0
