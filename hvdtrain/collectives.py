"""What ranks do together. The only module that imports horovod or mpi4py.

:class:`HorovodCollectives` is the real one, :class:`OneProcess` the same for a single process
without Horovod, for unit tests and wherever Horovod is not to be started.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain import process
from hvdtrain.errors import UsageError
from hvdtrain.messages import packing_of

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Gradients after their reduction, in the messages in which they travelled."""

    sent: Sequence[tf.Tensor]
    """This rank's own messages."""
    messages: Sequence[tf.Tensor]
    """Of sparse gradients, the values of all ranks."""
    unpack: Callable[[Sequence[tf.Tensor]], list[Gradient]]
    """Takes the gradients out of messages."""

    @property
    def gradients(self) -> list[Gradient]:
        return self.unpack(self.messages)


GradientReducer = Callable[[Sequence[Gradient]], Reduced]

_REDUCE_OPS = ("average", "sum", "adasum")
_COMPRESSIONS = ("none", "fp16")


class Collectives(Protocol):
    """Operations that every rank has to call, in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each array summed over ranks; shapes and dtypes must be the same on every rank."""

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Each tensor summed over ranks, where it is; on any thread, one call of a name at a time."""

    def of_host(self) -> "Collectives":
        """Those of the ranks on this rank's host alone; every rank has to call it.

        Horovod has to be started with ``hvdtrain.init(process_groups=True)``.
        """

    def sum_by_mpi(self, array: np.ndarray) -> np.ndarray | None:
        """The same by a bare MPI_Allreduce, to compare with; None where MPI does not connect the ranks."""

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        """Overwrites the variables with those of ``root_rank``."""

    def allgather(self, value: Any) -> list[Any]:
        """The picklable value of each rank, in rank order."""

    def barrier(self) -> None:
        """Waits for every rank."""

    def gradient_reducer(
        self, *, name: str, op: str, compression: str, groups: int | None, sparse_as_dense: bool
    ) -> GradientReducer:
        """A function that reduces the gradients of one step across ranks; it works inside a tf.function."""

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        """A scalar that is true where it is true on every rank; it works inside a tf.function."""

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's vector, shape ``[n]``, as the rows of one matrix ``[size, n]``.

        It works inside a tf.function and has a gradient. ``name`` is of the one place that calls it.
        """


class HorovodCollectives:
    """Ring allreduce and its kin over MPI, NCCL or Gloo, whichever Horovod was started with."""

    def __init__(self, launcher: process.Launcher):
        # Imported here, not above: loading Horovod's library takes time and needs MPI's.
        import horovod.tensorflow as hvd

        with process.horovod_start_environment(launcher):
            hvd.init()
        self._hvd = hvd
        self._among: dict[str, Any] = {}
        self._compiled_sums: dict[str, Callable[..., Any]] = {}
        if hvd.size() < launcher.size:
            raise UsageError(
                f"{launcher.name} started {launcher.size} ranks, but MPI connects {hvd.size()}: each would train "
                "alone. Launch with the mpirun of the MPI that Horovod was built with (see python -m hvdtrain doctor)."
            )

    @property
    def rank(self) -> int:
        return self._hvd.rank()

    @property
    def size(self) -> int:
        return self._hvd.size()

    @property
    def local_rank(self) -> int:
        return self._hvd.local_rank()

    @property
    def local_size(self) -> int:
        return self._hvd.local_size()

    @property
    def cross_rank(self) -> int:
        return self._hvd.cross_rank()

    @property
    def cross_size(self) -> int:
        return self._hvd.cross_size()

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = [np.asarray(array) for array in arrays]
        if self.size == 1:
            return [array.copy() for array in arrays]
        # One message for each dtype: the time of a small one is all latency.
        totals: list[np.ndarray] = list(arrays)
        for dtype in sorted({str(array.dtype) for array in arrays}):
            members = [i for i, array in enumerate(arrays) if str(array.dtype) == dtype]
            flat = np.concatenate([arrays[i].ravel() for i in members])
            if flat.size:
                flat = self._hvd.allreduce(
                    tf.constant(flat), op=self._hvd.Sum, name=f"hvdtrain_sum_{dtype}", **self._among
                ).numpy()
            ends = np.cumsum([arrays[i].size for i in members])
            for i, end in zip(members, ends, strict=True):
                totals[i] = flat[end - arrays[i].size : end].reshape(arrays[i].shape)
        return totals

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        if self.size == 1:
            return list(tensors)
        # Compiled, for there alone Horovod heeds a name: eager operations all have the same, and two threads that
        # meet in it fail.
        if name not in self._compiled_sums:
            hvd, among = self._hvd, self._among

            def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
                return [hvd.allreduce(each, op=hvd.Sum, name=f"{name}_{i}", **among) for i, each in enumerate(tensors)]

            self._compiled_sums[name] = _compiled(reduce)
        return self._compiled_sums[name](list(tensors))

    def sum_by_mpi(self, array: np.ndarray) -> np.ndarray | None:
        if not self._hvd.mpi_enabled():
            return None
        from mpi4py import MPI  # not above: it loads MPI, which a job over Gloo may not have

        total = np.empty_like(array)
        MPI.COMM_WORLD.Allreduce(array, total)
        return total

    def of_host(self) -> Collectives:
        if self.local_size == self.size:
            return self
        # Where hosts have different numbers of ranks, cross_rank does not tell them apart.
        host = self.cross_rank if self._hvd.is_homogeneous() else process.host_name()
        hosts = self.allgather(host)
        groups = [[rank for rank, each in enumerate(hosts) if each == host] for host in sorted(set(hosts))]
        # All groups on every rank: Horovod numbers them in the order in which they are made.
        sets = [self._hvd.add_process_set(group) for group in groups if len(group) > 1]
        mine = [each for each in sets if self.rank in each.ranks]
        return HostCollectives(self, mine[0]) if mine else OneProcess(self.rank)

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        if self.size == 1:
            return
        hvd, among = self._hvd, self._among

        def overwrite() -> None:
            for i, variable in enumerate(variables):
                # As bytes: Horovod broadcasts no bfloat16 and no uint32.
                is_bool = variable.dtype == tf.bool
                sent = variable.value() if is_bool else tf.bitcast(variable, tf.uint8)
                found = hvd.broadcast(sent, root_rank, name=f"hvdtrain_broadcast_{i}", **among)
                variable.assign(found if is_bool else tf.bitcast(found, variable.dtype))

        _compiled(overwrite)()

    def allgather(self, value: Any) -> list[Any]:
        return (
            [value] if self.size == 1 else self._hvd.allgather_object(value, name="hvdtrain_allgather", **self._among)
        )

    def barrier(self) -> None:
        # Horovod's own barrier is not there for TensorFlow.
        self.sum([np.zeros(1, np.float32)])

    def gradient_reducer(
        self, *, name: str, op: str, compression: str, groups: int | None, sparse_as_dense: bool
    ) -> GradientReducer:
        check_reducer_options(op, compression, groups)
        if self.size == 1:
            return unreduced
        hvd = self._hvd
        if op == "adasum":
            return self._adasum_reducer(compression)
        reduce_op = {"average": hvd.Average, "sum": hvd.Sum}[op]
        compressor = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[compression]

        def reduce(gradients: Sequence[Gradient]) -> Reduced:
            sparse = [] if sparse_as_dense else [i for i, each in enumerate(gradients) if is_sparse(each)]
            dense = [i for i in range(len(gradients)) if i not in sparse]
            if groups is not None and groups > len(dense):
                raise UsageError(
                    f"groups must be at most the number of dense gradients. Received: {groups} for {len(dense)}"
                )
            tensors = [tf.convert_to_tensor(gradients[i]) for i in dense]
            packing = packing_of(tensors, groups)
            packed = packing.pack(tensors)
            # With one core nothing is hidden behind the backward pass: a message sent meanwhile interrupts it.
            sent_together = self.size == self.local_size and process.computes_on_one_core()
            # Named, or Horovod would name them after the graph, which need not be the same on all ranks.
            with tf.control_dependencies(packed if sent_together else []):
                messages = [
                    hvd.allreduce(each, op=reduce_op, compression=compressor, name=f"{name}_{i}", **self._among)
                    for i, each in enumerate(packed)
                ]
            gathered = [hvd.allreduce(gradients[i], op=reduce_op, **self._among) for i in sparse]

            def unpack(messages: Sequence[tf.Tensor]) -> list[Gradient]:
                found = dict(zip(dense, packing.unpack(messages[: len(packed)]), strict=True))
                values = messages[len(packed) :]
                found |= {i: with_values(all_, each) for i, all_, each in zip(sparse, gathered, values, strict=True)}
                return [found[i] for i in range(len(gradients))]

            sent = [*packed, *(gradients[i].values for i in sparse)]
            return Reduced(sent, [*messages, *(each.values for each in gathered)], unpack)

        return reduce

    def _adasum_reducer(self, compression: str) -> GradientReducer:
        hvd = self._hvd
        if self.size & (self.size - 1):
            raise UsageError(
                f"op='adasum' needs a number of ranks that is a power of 2. Received: {self.size}. Use op='average'."
            )
        if not hvd.mpi_enabled():
            raise UsageError("op='adasum' needs MPI. This job runs over Gloo: launch with mpirun, or horovodrun --mpi.")
        compressor = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[compression]

        def reduce(gradients: Sequence[Gradient]) -> Reduced:
            # One by one: the angle between two ranks' gradients is taken for each variable by itself.
            tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
            reduced = [hvd.allreduce(each, op=hvd.Adasum, compression=compressor, **self._among) for each in tensors]
            return Reduced(tensors, reduced, list)

        return reduce

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        hvd, rank, size, among = self._hvd, self.rank, self.size, self._among

        @tf.custom_gradient
        def gather(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            rows = hvd.allgather(own[tf.newaxis], name=name, **among)
            rows.set_shape([size, own.shape[0]])

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Every rank's loss depends on this rank's row.
                return hvd.allreduce(upstream, op=hvd.Sum, name=f"{name}_gradient", **among)[rank]

            return rows, gradient

        return gather(row)

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        flag = self._hvd.allreduce(tf.cast(value, tf.int32), op=self._hvd.Min, name="hvdtrain_all_true", **self._among)
        return tf.cast(flag, tf.bool)


class HostCollectives(HorovodCollectives):
    """The same among the ranks of one host."""

    def __init__(self, everywhere: HorovodCollectives, process_set: Any):
        self._hvd = everywhere._hvd
        self._among = {"process_set": process_set}
        self._compiled_sums = {}

    @property
    def rank(self) -> int:
        return self.local_rank

    @property
    def size(self) -> int:
        return self.local_size

    @property
    def cross_rank(self) -> int:
        return 0

    @property
    def cross_size(self) -> int:
        return 1


class OneProcess:
    """The collectives of a single process, or of a rank by itself: every operation is the identity."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    cross_rank = 0
    cross_size = 1

    def __init__(self, rank: int = 0):
        self.rank = rank

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.array(array) for array in arrays]

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        return list(tensors)

    def sum_by_mpi(self, array: np.ndarray) -> np.ndarray | None:
        return None

    def of_host(self) -> Collectives:
        return self

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def gradient_reducer(
        self, *, name: str, op: str, compression: str, groups: int | None, sparse_as_dense: bool
    ) -> GradientReducer:
        check_reducer_options(op, compression, groups)
        return unreduced

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        return row[tf.newaxis]


def unreduced(gradients: Sequence[Gradient]) -> Reduced:
    """The reduction of a single rank: each gradient is a message."""

    def unpack(messages: Sequence[tf.Tensor]) -> list[Gradient]:
        return [
            with_values(gradient, message) if is_sparse(gradient) else message
            for gradient, message in zip(gradients, messages, strict=True)
        ]

    own = [values_of(each) for each in gradients]
    return Reduced(own, own, unpack)


def is_sparse(gradient: Gradient) -> bool:
    """True for that of an embedding, which holds the rows that were used."""
    return isinstance(gradient, tf.IndexedSlices)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Its numbers: of a sparse one those of the rows that were used."""
    return gradient.values if is_sparse(gradient) else gradient


def with_values(sparse: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """The same rows with other values."""
    return tf.IndexedSlices(values, sparse.indices, sparse.dense_shape)


def check_reducer_options(op: str, compression: str, groups: int | None) -> None:
    """Raises UsageError where an option breaks its rule."""
    if op not in _REDUCE_OPS:
        raise UsageError(f"op must be one of {', '.join(_REDUCE_OPS)}. Received: {op!r}")
    if compression not in _COMPRESSIONS:
        raise UsageError(f"compression must be one of {', '.join(_COMPRESSIONS)}. Received: {compression!r}")
    if groups is not None and op == "adasum":
        raise UsageError(f"op='adasum' reduces each gradient by itself. Received: groups={groups}. Leave groups out.")
    if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
        raise UsageError(f"groups must be None or a whole number of at least 1. Received: {groups!r}")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its operations run beside each other; without AutoGraph, which took most of the time of a small broadcast."""
    return tf.function(tf.autograph.experimental.do_not_convert(function))


def build_facts() -> dict[str, bool]:
    """How Horovod was built."""
    import horovod.tensorflow as hvd

    return {"MPI": bool(hvd.mpi_built()), "Gloo": bool(hvd.gloo_built()), "NCCL": bool(hvd.nccl_built())}
