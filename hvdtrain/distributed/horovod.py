"""The collectives over Horovod. The only module that imports horovod or mpi4py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.exclusions import Condition
from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.adasum import adasum_reducer
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compiled import compiled
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_allreduce import GradientAllreduce
from hvdtrain.distributed.gradient_reduction import GradientReducer, StepSum, single_rank_reducer
from hvdtrain.distributed.horovod_operations import HorovodOperations
from hvdtrain.distributed.object_messages import allgather_objects
from hvdtrain.distributed.program_operations import known_late, run_operations_late
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.distributed.variable_broadcast import overwrite_with_received
from hvdtrain.errors import UsageError
from hvdtrain.system import environment, network, versions
from hvdtrain.system.launcher import Launcher


class HorovodCollectives:
    """Ring allreduce and other collectives over MPI, NCCL or Gloo, whichever Horovod was started with."""

    may_change = False
    conditions: Sequence[Condition] = ()

    def __init__(self, launcher: Launcher):
        versions.check_horovod_distribution(tf.__version__)
        # Imported here, not above: loading Horovod's library takes time and needs MPI's.
        import horovod.tensorflow as hvd

        if launcher.starts_gloo:
            network.require_address_of_name()
        with environment.horovod_start_environment(launcher):
            hvd.init()
        run_operations_late()
        self._hvd = hvd
        self._operations = HorovodOperations(hvd)
        self._compiled_sums: dict[str, Callable[..., Any]] = {}
        self._longest: dict[str, tf.Variable] = {}
        self._process_sets: dict[tuple[int, ...], Any] = {}
        if hvd.size() < launcher.fewest_ranks:
            raise UsageError(
                f"all ranks must be connected. {launcher.name} started {launcher.fewest_ranks} or more, but MPI "
                f"connects {hvd.size()}: each would train on its own. Launch with the mpirun of the MPI that Horovod "
                "was built with (see python -m hvdtrain doctor)."
            )

    def __deepcopy__(self, memo: object) -> "HorovodCollectives":
        """Returns itself: a copied callback has the same ranks. KerasTuner copies those of each trial."""
        return self

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
                    flat = self._operations.allreduce(tf.constant(flat), self._hvd.Sum, f"hvdtrain_sum_{dtype}").numpy()
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
                return [
                    self._operations.allreduce(each, self._hvd.Sum, f"{name}_{i}") for i, each in enumerate(tensors)
                ]

            self._compiled_sums[name] = compiled(reduce)
        if not tf.executing_eagerly():
            tensors = [known_late(each) for each in tensors]
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
        if len(members) == 1:
            totals[members[0]] = self._operations.allreduce(totals[members[0]], self._hvd.Sum, "hvdtrain_sum_of_one")
            return
        for i, total in zip(members, self._operations.sum_together([totals[i] for i in members]), strict=True):
            totals[i] = total

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
            return self._operations.broadcast(tensor, self._global_rank(root_rank), name)

        overwrite_with_received(variables, send, is_root=self.rank == root_rank)

    def _global_rank(self, rank: int) -> int:
        return rank

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        # Not Horovod's allgather_object: it counts the bytes of all ranks together in 32 bits.
        return allgather_objects(value, self.size, self._allgather)

    def _allgather(self, array: np.ndarray, name: str) -> np.ndarray:
        with tf.device("CPU"):  # not in the memory of a GPU
            return self._operations.allgather(tf.constant(array), name).numpy()

    def alltoall(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self.size == 1:
            return list(pieces)
        with tf.device("CPU"):
            sent = tf.constant(np.concatenate(pieces))
            lengths = tf.constant([len(piece) for piece in pieces], tf.int32)
            received, lengths = self._operations.alltoall(sent, lengths, "hvdtrain_alltoall")
        return np.split(np.asarray(received), np.cumsum(lengths.numpy())[:-1])

    def barrier(self) -> None:
        # Horovod has no barrier for TensorFlow.
        self.sum([np.zeros(1, np.float32)])

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        if not self.reduces:
            return single_rank_reducer(config)
        if not config.is_linear:
            return adasum_reducer(self._operations, self.size)
        return GradientAllreduce(self._operations, self).reducer(config)

    def step_sum(self, num_buckets: int | None = None) -> StepSum:
        return GradientAllreduce(self._operations, self).step_sum(num_buckets)

    def num_ranks(self) -> int | tf.Tensor:
        return self.size

    def _own_rank(self) -> int | tf.Tensor:
        """This rank's number, when a compiled step runs."""
        return self.rank

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        num_ranks = self.num_ranks()

        @tf.custom_gradient
        def gather(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            is_bfloat16 = own.dtype == tf.bfloat16
            sent = tf.cast(own, tf.float32) if is_bfloat16 else own
            rows = self._operations.allgather(sent[tf.newaxis], name)
            rows.set_shape([num_ranks if isinstance(num_ranks, int) else None, own.shape[0]])

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Every rank's loss depends on this rank's row.
                return self._operations.allreduce(upstream, self._hvd.Sum, f"{name}_gradient")[self._own_rank()]

            return tf.cast(rows, own.dtype), gradient

        return gather(row)

    def gather_samples(self, own: tf.Tensor, name: str) -> tf.Tensor:
        count = tf.shape(own)[0]
        counts = self._operations.allgather(known_late(count[tf.newaxis]), f"{name}_counts")

        @tf.custom_gradient
        def gather(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            sent = tf.cast(own, tf.float32) if own.dtype == tf.bfloat16 else own
            everyone = tf.cast(self._operations.allgather(known_late(sent), name), own.dtype)
            everyone.set_shape([None, *own.shape[1:]])

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # Every rank's loss depends on this rank's samples.
                upstream = known_late(upstream)
                total = self._operations.allreduce(upstream, self._hvd.Sum, f"{name}_gradient")
                first = tf.reduce_sum(counts[: self._own_rank()])
                return tf.ensure_shape(total[first : first + count], own.shape)

            return everyone, gradient

        return gather(own)

    def exchange_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        lengths = tf.ones([self.size], tf.int32)
        return tf.ensure_shape(self._operations.alltoall(rows, lengths, name)[0], rows.shape)

    def exchange_parts(self, tensor: tf.Tensor, lengths: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        # Horovod does not know bfloat16, and moves bytes here.
        sent = tf.bitcast(tensor, tf.int16) if tensor.dtype == tf.bfloat16 else tensor
        sent = known_late(sent)
        if self.cross_size > 1:
            sent = self._of_known_shape(sent, name)
        received, numbers = self._operations.alltoall(sent, tf.cast(lengths, tf.int32), name)
        received = tf.bitcast(received, tf.bfloat16) if tensor.dtype == tf.bfloat16 else received
        return tf.ensure_shape(received, [None, *tensor.shape[1:]]), tf.ensure_shape(numbers, lengths.shape)

    def _of_known_shape(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """A message with rows at its end that are not sent, so that it is as long as the longest one so far.

        If no rank's message has a new shape, Horovod needs one round trip less to agree on it.
        """
        if name not in self._longest:
            with outside_of_step(), tf.device("CPU"):
                self._longest[name] = tf.Variable(0, trainable=False)
        longest, number = self._longest[name], tf.shape(rows)[0]
        # The reserve keeps later messages from being longer.
        known = tf.where(number > longest, number + number // 8, longest)
        with tf.control_dependencies([longest.assign(known)]):
            missing = known - number
        return tf.pad(rows, [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)])

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        flag = self._operations.allreduce(tf.cast(value, tf.int32), self._hvd.Min, "hvdtrain_all_true")
        return tf.cast(flag, tf.bool)


class ProcessSetCollectives(HorovodCollectives):
    """The collectives of some of the ranks, a Horovod process set; they count as one host."""

    def __init__(self, world: HorovodCollectives, process_set: Any):
        self._process_set = process_set
        self._hvd = world._hvd
        self._operations = HorovodOperations(world._hvd, process_set)
        self._compiled_sums = {}
        self._longest = {}

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
