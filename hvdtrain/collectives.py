"""What ranks do together. The only module that imports horovod or mpi4py.

:class:`HorovodCollectives` is the real one, :class:`OneProcess` the same for a single process
without Horovod, for unit tests and wherever Horovod is not to be started.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import process
from hvdtrain.errors import UsageError

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
GradientReducer = Callable[[Sequence[Gradient]], list[Gradient]]

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

            self._compiled_sums[name] = tf.function(tf.autograph.experimental.do_not_convert(reduce))
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
        if self.size > 1 and variables:
            self._hvd.broadcast_variables(list(variables), root_rank=root_rank, **self._among)

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
            return list
        hvd = self._hvd
        if op == "adasum":
            return self._adasum_reducer(compression)
        from horovod.tensorflow.keras import DistributedOptimizer

        reduce_op = {"average": hvd.Average, "sum": hvd.Sum}[op]
        # Keras 3 calls none of the hooks of Horovod's optimizer, but its reduction is whole: it is
        # made around an optimizer that never applies anything.
        horovod_optimizer = DistributedOptimizer(
            keras.optimizers.SGD(),
            name=f"Distributed_{name}",
            compression={"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[compression],
            op=reduce_op,
            groups=groups,
            **self._among,
        )

        def reduce(gradients: Sequence[Gradient]) -> list[Gradient]:
            reduced: list[Any] = [None] * len(gradients)
            dense: list[int] = []
            for i, gradient in enumerate(gradients):
                if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
                    # Not in a group: Horovod 0.28.1 takes the dense shapes there from the wrong gradients.
                    reduced[i] = hvd.allreduce(gradient, op=reduce_op, **self._among)
                else:
                    dense.append(i)
            if groups is not None and groups > len(dense):
                raise UsageError(
                    f"groups must be at most the number of dense gradients. Received: {groups} for {len(dense)}"
                )
            tensors = [tf.convert_to_tensor(gradients[i]) for i in dense]
            # The second argument only gives the number of variables.
            for i, tensor in zip(dense, horovod_optimizer._allreduce_grads(tensors, tensors), strict=True):
                reduced[i] = tensor
            return reduced

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

        def reduce(gradients: Sequence[Gradient]) -> list[Gradient]:
            # One by one: the angle between two ranks' gradients is taken for each variable by itself.
            tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
            return [hvd.allreduce(tensor, op=hvd.Adasum, compression=compressor, **self._among) for tensor in tensors]

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
        return list

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        return row[tf.newaxis]


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


def build_facts() -> dict[str, bool]:
    """How Horovod was built."""
    import horovod.tensorflow as hvd

    return {"MPI": bool(hvd.mpi_built()), "Gloo": bool(hvd.gloo_built()), "NCCL": bool(hvd.nccl_built())}
