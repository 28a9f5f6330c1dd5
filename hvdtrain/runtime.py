"""Brings a rank up: environment, Horovod, GPU, threads, seeds."""

import contextlib
import dataclasses
from collections.abc import Iterator

import keras
import tensorflow as tf

from hvdtrain import process
from hvdtrain.collectives import Collectives, HorovodCollectives, OneProcess
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where this rank stands among all."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    device: str
    threads: int
    launcher: str


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A rank that is up."""

    topology: Topology
    collectives: Collectives


_runtime: Runtime | None = None


def init(
    *,
    seed: int | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    timeline: str | None = None,
    process_groups: bool = False,
) -> Topology:
    """Starts Horovod and gives this rank its GPU, its share of the cores and its seeds.

    Call it first, before TensorFlow computes anything. A second call returns what the first one made.

    Args:
        seed: for Keras, NumPy and Python, the same on every rank; None leaves them alone.
        threads: compute threads of this rank; None: a fair share of the host's cores. A step that calls
            ``tf.function`` from a ``tf.py_function`` needs 2.
        deterministic: bit-equal runs, at the cost of speed.
        timeline: a file in which rank 0 has Horovod trace every reduction, for chrome://tracing.
        process_groups: whether ranks of one host are to average among themselves.

    Raises:
        UsageError: the launcher started more ranks than MPI connects, or Keras runs on another backend.
    """
    global _runtime
    if _runtime is None:
        _runtime = _start(threads, deterministic, timeline, process_groups)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    return _runtime.topology


def _start(threads: int | None, deterministic: bool, timeline: str | None, process_groups: bool) -> Runtime:
    process.prepare_environment()
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            f"Keras must run on TensorFlow. Received: {keras.backend.backend()}. Unset KERAS_BACKEND, or import "
            "hvdtrain before keras."
        )
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if process_groups:
        process.allow_process_groups()
    if timeline is not None:
        process.trace_reductions(timeline)
    launcher = process.find_launcher()
    process.choose_fusion(launcher, deterministic)
    collectives = HorovodCollectives(launcher)
    device = process.configure_devices(collectives.local_rank, collectives.local_size, threads, launcher.bound_to_cores)
    topology = Topology(
        rank=collectives.rank,
        size=collectives.size,
        local_rank=collectives.local_rank,
        local_size=collectives.local_size,
        cross_rank=collectives.cross_rank,
        cross_size=collectives.cross_size,
        host=process.host_name(),
        device=device,
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
        launcher=launcher.name,
    )
    return Runtime(topology, collectives)


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        UsageError: hvdtrain.init() was not called.
    """
    if _runtime is None:
        raise UsageError("hvdtrain.init() must be called first, before the model is made.")
    return _runtime


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """In it, this rank is a job of one rank."""
    global _runtime
    before = current()
    topology = dataclasses.replace(before.topology, rank=0, size=1, cross_rank=0, cross_size=1)
    _runtime = Runtime(topology, OneProcess())
    try:
        yield
    finally:
        _runtime = before


def collectives() -> Collectives:
    """Those of this process; those of a process by itself where hvdtrain.init() was not called."""
    return OneProcess() if _runtime is None else _runtime.collectives
