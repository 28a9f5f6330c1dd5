"""The collectives over Horovod. The only module that imports horovod or mpi4py."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compiled import compiled
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import are_sent_together, bucket_layout
from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    GradientReducer,
    ReducedGradients,
    StepSum,
    is_sparse,
    most_rows,
    single_rank_reducer,
    sum_of_elements,
    with_unique_rows,
    with_values,
)
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.variable_broadcast import overwrite_with_received
from hvdtrain.errors import UsageError
from hvdtrain.system import environment, network, versions
from hvdtrain.system.launcher import Launcher

_HALVES = (tf.bfloat16, tf.float16)


class HorovodCollectives:
    """Ring allreduce and other collectives over MPI, NCCL or Gloo, whichever Horovod was started with."""

    may_change = False

    def __init__(self, launcher: Launcher):
        versions.check_horovod_distribution()
        # Imported here, not above: loading Horovod's library takes time and needs MPI's.
        import horovod.tensorflow as hvd

        with environment.horovod_start_environment(launcher):
            hvd.init()
        self._hvd = hvd
        # Ranks must use the same names. TensorFlow's scopes hold the names of optimizers, which Keras numbers: a rank
        # that has made another one before would wait for the others forever.
        self._call_options: dict[str, Any] = {"ignore_name_scope": True}
        self._compiled_sums: dict[str, Callable[..., Any]] = {}
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._num_reducers = 0
        if hvd.size() < launcher.size:
            raise UsageError(
                f"all ranks must be connected. {launcher.name} started {launcher.size}, but MPI connects {hvd.size()}: "
                "each would train on its own. Launch with the mpirun of the MPI that Horovod was built with (see "
                "python -m hvdtrain doctor)."
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

    @property
    def reduces(self) -> bool:
        return self.size > 1

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = [np.asarray(array) for array in arrays]
        if self.size == 1:
            return [array.copy() for array in arrays]
        # One allreduce for each dtype: a small one takes only latency.
        totals: list[np.ndarray] = list(arrays)
        for dtype in sorted({str(array.dtype) for array in arrays}):
            members = [i for i, array in enumerate(arrays) if str(array.dtype) == dtype]
            flat = np.concatenate([arrays[i].ravel() for i in members])
            if flat.size:
                with tf.device("CPU"):
                    flat = self._allreduce(tf.constant(flat), self._hvd.Sum, f"hvdtrain_sum_{dtype}").numpy()
            ends = np.cumsum([arrays[i].size for i in members])
            for i, end in zip(members, ends, strict=True):
                totals[i] = flat[end - arrays[i].size : end].reshape(arrays[i].shape)
        return totals

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        if not self.reduces:
            return list(tensors)
        # Compiled, because only then does Horovod use the name: eager operations all share one, and two threads
        # that use it at the same time fail.
        if name not in self._compiled_sums:

            def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
                return [self._allreduce(each, self._hvd.Sum, f"{name}_{i}") for i, each in enumerate(tensors)]

            self._compiled_sums[name] = compiled(reduce)
        return self._compiled_sums[name](list(tensors))

    def sum_on_this_thread(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.size == 1:
            return list(tensors)
        # Eager operations run on the thread that calls them.
        totals: list[tf.Tensor] = list(tensors)
        for dtype in sorted({each.dtype.name for each in tensors}):
            members = [i for i, each in enumerate(tensors) if each.dtype.name == dtype]
            # Horovod counts the elements of a group in 32 bits.
            for group in bounded_messages.groups_of_bounded_size([tensors[i] for i in members]):
                self._sum_together([members[i] for i in group], totals)
        return totals

    def _sum_together(self, members: Sequence[int], totals: list[tf.Tensor]) -> None:
        """Replaces tensors of one dtype by their sums over ranks, in one message if there are several."""
        dtype = totals[members[0]].dtype
        if len(members) == 1:
            totals[members[0]] = self._allreduce(totals[members[0]], self._hvd.Sum, "hvdtrain_sum_of_one")
            return
        sent = [tf.cast(totals[i], tf.float32) if dtype in _HALVES else totals[i] for i in members]
        found = self._hvd.grouped_allreduce(sent, op=self._hvd.Sum, **self._call_options)
        for i, total in zip(members, found, strict=True):
            totals[i] = tf.cast(total, dtype)

    def mpi_sum(self, array: np.ndarray) -> np.ndarray | None:
        if not self._hvd.mpi_enabled():
            return None
        from mpi4py import MPI  # not above: it loads MPI, which a job over Gloo may not have

        total = np.empty_like(array)
        MPI.COMM_WORLD.Allreduce(array, total)
        return total

    def host_collectives(self) -> Collectives:
        if self.local_size == self.size:
            return self
        # If hosts have different numbers of ranks, cross_rank does not identify them.
        host = self.cross_rank if self._hvd.is_homogeneous() else network.host_name()
        hosts = self.allgather(host)
        return self.split([[rank for rank, each in enumerate(hosts) if each == host] for host in sorted(set(hosts))])

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        for group in map(tuple, groups):
            # Every rank adds all sets: Horovod numbers them in the order in which they are added, and each once.
            if len(group) > 1 and group not in self._process_sets:
                self._process_sets[group] = self._hvd.add_process_set(list(group))
        sets = [self._process_sets[tuple(group)] for group in groups if len(group) > 1]
        mine = [each for each in sets if self.rank in each.ranks]
        return ProcessSetCollectives(self, mine[0]) if mine else SingleProcessCollectives(self.rank)

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        if self.size == 1:
            return

        def send(tensor: tf.Tensor, name: str) -> tf.Tensor:
            return self._hvd.broadcast(tensor, self._global_rank(root_rank), name=name, **self._call_options)

        overwrite_with_received(variables, send, is_root=self.rank == root_rank)

    def _global_rank(self, rank: int) -> int:
        return rank

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        # Not Horovod's allgather_object: it counts the bytes of all ranks together in 32 bits.
        own = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        sizes = self._allgather(np.array([own.size]), "hvdtrain_allgather_sizes")
        received = [bytearray() for _ in sizes]
        for start, end in bounded_messages.message_bounds(int(max(sizes)), element_bytes=self.size):
            together = self._allgather(own[start:end], "hvdtrain_allgather")
            ends = np.cumsum(np.clip(sizes - start, 0, end - start))
            for each, part in zip(received, np.split(together, ends[:-1]), strict=True):
                each += part.data
        # One by one, so that memory never holds all of them twice.
        return [pickle.loads(received.pop(0)) for _ in range(self.size)]

    def _allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        with tf.device("CPU"):  # not in the memory of a GPU
            return self._hvd.allgather(tf.constant(array), name=name, **self._call_options).numpy()

    def _allreduce(self, tensor: tf.Tensor, op: Any, name: str, *, in_half: bool = False) -> tf.Tensor:
        """An allreduce of a tensor of any size and float dtype.

        Horovod does not know bfloat16, and a sum of float16 overflows with few ranks: both are summed in float32,
        unless ``in_half`` says that the sum of float16 cannot overflow.
        """

        def send(piece: tf.Tensor, suffix: str) -> tf.Tensor:
            sent = tf.cast(piece, tf.float32) if piece.dtype in _HALVES and not in_half else piece
            return tf.cast(self._hvd.allreduce(sent, op=op, name=name + suffix, **self._call_options), piece.dtype)

        return bounded_messages.in_pieces(tensor, send)

    def alltoall(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.size == 1:
            return list(pieces)
        with tf.device("CPU"):
            sent = tf.constant(np.concatenate(pieces))
            lengths = tf.constant([len(piece) for piece in pieces], tf.int32)
            received, lengths = self._hvd.alltoall(sent, lengths, name="hvdtrain_alltoall", **self._call_options)
        return np.split(np.asarray(received), np.cumsum(lengths.numpy())[:-1])

    def barrier(self) -> None:
        # Horovod has no barrier for TensorFlow.
        self.sum([np.zeros(1, np.float32)])

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        if not self.reduces:
            return single_rank_reducer(config)
        if config.op == "adasum":
            return self._adasum_reducer()
        averages, name = config.op == "average", ""
        reduce_op = self._hvd.Average if averages else self._hvd.Sum

        def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
            nonlocal name
            name = name or self._next_reducer_name()
            sparse = [] if config.sparse_as_dense else [i for i, each in enumerate(gradients) if is_sparse(each)]
            dense = [i for i in range(len(gradients)) if i not in sparse]
            if config.groups is not None and config.groups > len(dense):
                raise UsageError(
                    f"groups must be at most the number of dense gradients. Received: {config.groups} for {len(dense)}"
                )
            tensors = [tf.convert_to_tensor(gradients[i]) for i in dense]
            layout = bucket_layout(tensors, config.groups)
            packed = layout.pack(tensors)
            sums = {i: sum_of_elements(each) for i, each in enumerate(packed) if bounded_messages.is_large(each)}
            buckets = self._reduce_buckets(packed, reduce_op, name, sums)
            gathered = [self._gather_slices(gradients[i], averages, f"{name}_rows_{i}") for i in sparse]

            def unpack(buckets: Sequence[tf.Tensor]) -> list[Gradient]:
                found = dict(zip(dense, layout.unpack(buckets[: len(packed)]), strict=True))
                values = buckets[len(packed) :]
                found |= {i: with_values(all_, each) for i, all_, each in zip(sparse, gathered, values, strict=True)}
                return [found[i] for i in range(len(gradients))]

            sent = [*packed, *(gradients[i].values for i in sparse)]
            return ReducedGradients(sent, [*buckets, *(each.values for each in gathered)], unpack, sums=sums)

        return reduce

    def step_sum(self, num_buckets: int | None = None) -> StepSum:
        name = ""

        def total(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal name
            name = name or self._next_reducer_name()
            layout = bucket_layout(tensors, num_buckets and min(num_buckets, len(tensors)))
            return layout.unpack(self._reduce_buckets(layout.pack(tensors), self._hvd.Sum, name, {}, in_half=True))

        return total

    def _reduce_buckets(
        self, packed: Sequence[tf.Tensor], op: Any, name: str, sums: Mapping[int, tf.Tensor], **options: bool
    ) -> list[tf.Tensor]:
        reduced: list[tf.Tensor] = []
        last: list[tf.Tensor] = []
        with tf.control_dependencies(packed if are_sent_together(self.size, self.local_size) else []):
            # Each result takes memory from when its reduction is begun; what was sent is free when it has ended.
            for group in bounded_messages.groups_of_bounded_size(packed):
                first = [sums[i] for i in group if i in sums]
                with tf.control_dependencies([*first, *map(bounded_messages.arrival, last)]):
                    last = [self._allreduce(packed[i], op, f"{name}_{i}", **options) for i in group]
                reduced += last
        return reduced

    def _next_reducer_name(self) -> str:
        self._num_reducers += 1
        return f"hvdtrain_gradients_{self._num_reducers}"

    def num_ranks(self) -> int | tf.Tensor:
        return self.size

    def _own_rank(self) -> int | tf.Tensor:
        """This rank's number, when a compiled step runs."""
        return self.rank

    def _gather_slices(self, own: tf.IndexedSlices, averages: bool, name: str) -> tf.IndexedSlices:
        """The mean or the sum over ranks of a sparse gradient; each row once."""
        own = with_unique_rows(own)  # fewer rows to send
        sent = tf.cast(own.values, tf.float32) if own.values.dtype == tf.bfloat16 else own.values

        def gather(columns: tf.Tensor, suffix: str) -> tf.Tensor:
            return self._hvd.allgather(columns, name=f"{name}_values{suffix}", **self._call_options)

        values = bounded_messages.in_columns(sent, self.size * most_rows(own), gather)
        rows = self._hvd.allgather(own.indices, name=f"{name}_indices", **self._call_options)
        values = tf.cast(values, own.values.dtype) / tf.cast(self.num_ranks() if averages else 1, own.values.dtype)
        return with_unique_rows(tf.IndexedSlices(values, rows, own.dense_shape))

    def _adasum_reducer(self) -> GradientReducer:
        if self.size & (self.size - 1):
            raise UsageError(
                f"op='adasum' needs a number of ranks that is a power of 2. Received: {self.size}. Use op='average'."
            )
        if not self._hvd.mpi_enabled():
            raise UsageError("op='adasum' needs MPI. This job runs over Gloo: launch with mpirun, or horovodrun --mpi.")

        def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
            # One by one: Adasum uses the angle between two ranks' gradients of each variable.
            tensors = list(map(tf.convert_to_tensor, gradients))
            if any(bounded_messages.num_bytes(each) > bounded_messages.MAX_MESSAGE_BYTES for each in tensors):
                raise UsageError("op='adasum' needs gradients of at most 1 GiB. Use op='average' or local_layers.")
            reduced = [self._hvd.allreduce(each, op=self._hvd.Adasum, **self._call_options) for each in tensors]
            return ReducedGradients(tensors, reduced, list)

        return reduce

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        hvd, size, call_options = self._hvd, None if self.may_change else self.size, self._call_options

        @tf.custom_gradient
        def gather(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            is_bfloat16 = own.dtype == tf.bfloat16
            sent = tf.cast(own, tf.float32) if is_bfloat16 else own
            rows = hvd.allgather(sent[tf.newaxis], name=name, **call_options)
            rows.set_shape([size, own.shape[0]])

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Every rank's loss depends on this rank's row.
                return self._allreduce(upstream, hvd.Sum, f"{name}_gradient")[self._own_rank()]

            return tf.cast(rows, own.dtype), gradient

        return gather(row)

    def exchange_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        lengths = tf.ones([self.size], tf.int32)
        return tf.ensure_shape(self._hvd.alltoall(rows, lengths, name=name, **self._call_options)[0], rows.shape)

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        flag = self._hvd.allreduce(
            tf.cast(value, tf.int32), op=self._hvd.Min, name="hvdtrain_all_true", **self._call_options
        )
        return tf.cast(flag, tf.bool)


class ProcessSetCollectives(HorovodCollectives):
    """The collectives of some of the ranks, a Horovod process set; they count as one host."""

    def __init__(self, world: HorovodCollectives, process_set: Any):
        self._process_set = process_set
        self._hvd = world._hvd
        self._call_options = {**world._call_options, "process_set": process_set}
        self._compiled_sums = {}
        self._num_reducers = 0

    def _global_rank(self, rank: int) -> int:
        return self._process_set.ranks[rank]

    @property
    def rank(self) -> int:
        return self._process_set.rank()

    @property
    def size(self) -> int:
        return self._process_set.size()

    @property
    def local_rank(self) -> int:
        return self.rank

    @property
    def local_size(self) -> int:
        return self.size

    @property
    def cross_rank(self) -> int:
        return 0

    @property
    def cross_size(self) -> int:
        return 1


def build_facts() -> dict[str, bool]:
    """What Horovod was built with."""
    import horovod.tensorflow as hvd

    return {"MPI": bool(hvd.mpi_built()), "Gloo": bool(hvd.gloo_built()), "NCCL": bool(hvd.nccl_built())}
