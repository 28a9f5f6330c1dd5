"""The collectives of an elastic job, whose ranks change while it runs: over Gloo, started anew for each generation."""

import contextlib
import dataclasses
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer, ReducedGradients
from hvdtrain.distributed.horovod import HorovodCollectives
from hvdtrain.distributed.local_rendezvous import local_rendezvous
from hvdtrain.system import environment
from hvdtrain.system.launcher import Launcher

_SHUT_INTERVAL_S = 0.02
_TCP_CLOSE = 7
"""The state of Linux' ``TCP_INFO``."""


class ElasticCollectives(HorovodCollectives):
    """Collectives that can be started again with other ranks, without another trace of what was compiled.

    Compiled steps always reduce, even while there is one rank, and no number of ranks is part of them.
    """

    may_change = True
    conditions = (exclusions.ELASTIC,)

    def __init__(self, launcher: Launcher):
        self._sockets_lock = threading.Lock()
        self._sockets: set[_Socket] = set()
        self._sockets_before: set[_Socket] | None = None
        """While the ranks connect: the sockets that are not theirs."""
        with _asking_once(), self._noting_sockets():
            super().__init__(launcher)

    @property
    def reduces(self) -> bool:
        return True

    def restart(self, place: Mapping[str, int], interface: str, rendezvous: tuple[str, int]) -> None:
        """Leaves the ranks of before and connects to others.

        Args:
            place: see :func:`~hvdtrain.system.environment.set_place`.
            interface: the network interface that leads to the other ranks.
            rendezvous: its address and port.

        Raises:
            Exception: one of them is lost.
        """
        self.leave()
        environment.set_place(place, interface, rendezvous)
        environment.set_gloo_timeout_of_restarts(place["size"])
        with _asking_once(), self._noting_sockets():
            self._hvd.init()

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        """What connects within belongs to the ranks."""
        with self._sockets_lock:
            before = self._sockets_before = _tcp_sockets()
        try:
            yield
        finally:
            with self._sockets_lock:
                self._sockets, self._sockets_before = _tcp_sockets() - before, None

    def leave(self) -> None:
        """Disconnects from the ranks of this generation; those that live must call it together."""
        self._hvd.shutdown()
        with self._sockets_lock:
            self._sockets = set()

    def cut(self) -> None:
        """Makes the collectives or the start that are under way fail at once, from any thread.

        The ranks that are connected to a lost one notice it by themselves, the others only after Gloo's timeout.
        """
        with self._sockets_lock:
            start = self._sockets_before
            _shut(self._sockets if start is None else _tcp_sockets() - start)
        if start is not None:
            # A rank that has just read the address of a lost one connects only after this.
            threading.Thread(target=self._shut_until_it_ends, args=(start,), daemon=True).start()

    def _shut_until_it_ends(self, start: set["_Socket"]) -> None:
        """Shuts what one start of the ranks connects, and not what the next one does."""
        while True:
            with self._sockets_lock:
                if self._sockets_before is not start:
                    return
                _shut(_tcp_sockets() - start)
            time.sleep(_SHUT_INTERVAL_S)

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        reduce = super().gradient_reducer(config)

        def reduce_all_or_nothing(gradients: Sequence[Gradient]) -> ReducedGradients:
            reduced = reduce(gradients)
            # If a rank is lost, no variable may be updated unless all gradients were reduced: the step is repeated.
            with tf.control_dependencies(list(reduced.buckets)):
                buckets = [tf.identity(bucket) for bucket in reduced.buckets]
            return dataclasses.replace(reduced, buckets=buckets)

        return reduce_all_or_nothing

    def num_ranks(self) -> tf.Tensor:
        return self._hvd.size_op()

    def _own_rank(self) -> tf.Tensor:
        return self._hvd.rank_op()


@contextlib.contextmanager
def _asking_once() -> Iterator[None]:
    """In the block, Horovod asks this process for the other ranks' addresses, which asks the rendezvous once."""
    rendezvous = environment.rendezvous()
    if rendezvous is None:
        yield
        return
    token = environment.elastic_token() or ""
    with local_rendezvous(environment.place(), rendezvous, token) as local:
        environment.set_rendezvous(local, token)
        try:
            yield
        finally:
            environment.set_rendezvous(rendezvous)


class _Socket(NamedTuple):
    descriptor: int
    inode: int
    """Horovod closes the sockets of before only when it starts again: new ones may have the same descriptors."""


def _tcp_sockets() -> set[_Socket]:
    """This process's TCP sockets that are connected, connect or listen.

    Not from the kernel's table of all connections, whose reading may miss some.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # Descriptors are closed meanwhile, that of the listing among them; sockets of other kinds have no such state.
        with contextlib.suppress(OSError):
            descriptor, status = int(name), os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    state = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    if state != _TCP_CLOSE:
                        found.add(_Socket(descriptor, status.st_ino))
    return found


def _shut(sockets: set[_Socket]) -> None:
    for each in sockets:
        # Horovod may have closed it, and its descriptor may be that of another file.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as duplicate:
            if os.fstat(duplicate.fileno()).st_ino == each.inode:
                duplicate.shutdown(socket.SHUT_RDWR)
