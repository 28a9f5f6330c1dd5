"""Starts a rank: environment, Horovod, GPU, threads and seeds."""

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Literal

import keras
import tensorflow as tf

from hvdtrain.distributed import gpu_sharing
from hvdtrain.distributed.cache_files import separate_cache_files
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import GpuConfig
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.horovod import HorovodCollectives
from hvdtrain.distributed.keras_downloads import share_downloads
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.whole_saves import save_whole
from hvdtrain.errors import UsageError
from hvdtrain.system import devices, environment, network, process_limit
from hvdtrain.system.launcher import Launcher
from hvdtrain.system.terminal import report

OnUnequal = Literal["stop", "warn", "ignore"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The place of this rank among all ranks."""

    rank: int
    """This rank's number, from 0."""
    size: int
    """The number of ranks of the job."""
    local_rank: int
    """This rank's number on its host, from 0."""
    local_size: int
    """The number of ranks on this host."""
    cross_rank: int
    """The number of this host among those that have a rank with this local_rank, from 0."""
    cross_size: int
    """The number of hosts that have a rank with this local_rank."""
    host: str
    """The name of this host."""
    device: str
    """The device that this rank computes on."""
    threads: int
    """The number of threads that an operation may use."""
    launcher: str
    """What started this rank."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A started rank."""

    topology: Topology
    collectives: Collectives
    process_sets: bool = False
    """Whether Horovod was started with process sets."""
    on_unequal: OnUnequal = "stop"
    """What to do if a step of ``model.fit`` is not that of one process."""


_runtime: Runtime | None = None


def init(
    *,
    seed: int | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    timeline: str | None = None,
    process_sets: bool = False,
    gpus: GpuConfig | None = None,
    on_unequal: OnUnequal = "stop",
) -> Topology:
    """Starts this rank without watching how others end; the arguments and errors are those of ``hvdtrain.init``."""
    global _runtime
    if _runtime is None:
        gpus = gpus or GpuConfig()
        _runtime = dataclasses.replace(
            _start(threads, deterministic, timeline, process_sets, gpus), on_unequal=on_unequal
        )
        if not _runtime.collectives.may_change:  # Otherwise ranks start one by one.
            gpu_sharing.require_own_gpus(_runtime.collectives, _runtime.topology.device, gpus)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    return _runtime.topology


def _start(
    threads: int | None, deterministic: bool, timeline: str | None, process_sets: bool, gpus: GpuConfig
) -> Runtime:
    environment.prepare_environment()
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            f"Keras must use the TensorFlow backend. Received: {keras.backend.backend()}. Unset KERAS_BACKEND, or "
            "import hvdtrain before keras."
        )
    tf.debugging.set_log_device_placement(gpus.log_device_placement)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if process_sets:
        environment.enable_dynamic_process_sets()
    if timeline is not None:
        environment.enable_timeline(timeline)
    launcher = environment.launcher()
    _require_rank(launcher)
    if (shortage := process_limit.shortage()) is not None:
        report(launcher.rank, shortage)
    collectives: Collectives
    if environment.elastic_job() is not None:
        if not environment.has_joined():
            raise UsageError(
                "elastic jobs train with python -m hvdtrain, or a program that calls hvdtrain.elastic.init() instead "
                "of hvdtrain.init(). Received: another program, each process of which would train alone."
            )
        environment.choose_settings_for_restarts(deterministic=deterministic)
        collectives = ElasticCollectives(launcher)
    else:
        environment.choose_fusion(launcher, deterministic=deterministic, has_gpu=devices.has_gpu())
        collectives = HorovodCollectives(launcher)
    if collectives.size > 1 or collectives.may_change:
        share_downloads()
        separate_cache_files(collectives)
        save_whole(collectives)
    device = devices.configure_devices(
        collectives.local_rank, collectives.local_size, threads, launcher.bound_to_cores, gpus.gpu_memory
    )
    topology = Topology(
        rank=collectives.rank,
        size=collectives.size,
        local_rank=collectives.local_rank,
        local_size=collectives.local_size,
        cross_rank=collectives.cross_rank,
        cross_size=collectives.cross_size,
        host=network.host_name(),
        device=device,
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
        launcher=launcher.name,
    )
    return Runtime(topology, collectives, process_sets)


def _require_rank(launcher: Launcher) -> None:
    """Refuses a child of a rank, which would wait in MPI for other ranks forever."""
    # A child that imports the program does not know its parent yet.
    if multiprocessing.current_process().name != "MainProcess" and launcher.size > 1:
        raise UsageError(
            "each rank must be one process. Received: hvdtrain.init() in a process that a rank has started by "
            "multiprocessing, which imports the program. Call hvdtrain.init() within if __name__ == '__main__':."
        )


def process_set(ranks: Sequence[int]) -> Collectives:
    """The collectives of some of the ranks; pass them as ``collectives`` to average over these ranks only.

    All ranks must call it with the same ranks; a rank outside the set receives the collectives of a single process, so
    that it trains alone.

    Args:
        ranks: at least two different ranks.

    Raises:
        UsageError: there are fewer or unknown ranks, or ``hvdtrain.init`` was called without ``process_sets=True``.
    """
    runtime = current()
    size = runtime.collectives.size
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise UsageError(
            f"ranks of a process set must be at least two different ones from 0 to {size - 1}. Received: {list(ranks)}"
        )
    if not runtime.process_sets:
        raise UsageError("process sets need hvdtrain.init(process_sets=True). Received: init without it.")
    return runtime.collectives.split([sorted(ranks)])


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        UsageError: hvdtrain.init() was not called.
    """
    if _runtime is None:
        raise UsageError("hvdtrain.init() must be called first, before the model is made.")
    return _runtime


def collectives() -> Collectives:
    """The collectives of this process; those of a single process if hvdtrain.init() was not called."""
    return SingleProcessCollectives() if _runtime is None else _runtime.collectives


def on_unequal() -> OnUnequal:
    """What to do if a step of ``model.fit`` is not that of one process."""
    return "stop" if _runtime is None else _runtime.on_unequal


@contextlib.contextmanager
def replaced_collectives(collectives: Collectives) -> Iterator[None]:
    """In the block, :func:`current` has these collectives."""
    global _runtime
    before = current()
    _runtime = dataclasses.replace(before, collectives=collectives)
    try:
        yield
    finally:
        _runtime = before
