"""A block in which a rank computes as a single process does, whatever its program asks of Horovod."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives

# Looked up, not imported: a program that has not imported them does not call them.
_MODULES = ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the block, this process is the only rank: for hvdtrain's functions, and for Horovod's that a program calls."""
    with contextlib.ExitStack() as stack:
        for name in _MODULES:
            if (module := sys.modules.get(name)) is not None:
                for function, own in _OF_ONE_PROCESS.items():
                    if hasattr(module, function):
                        stack.callback(setattr, module, function, getattr(module, function))
                        setattr(module, function, own)
        stack.enter_context(runtime.replaced_collectives(SingleProcessCollectives()))
        topology = runtime.current().topology
        before = dataclasses.asdict(topology)
        stack.callback(vars(topology).update, before)
        # The program has this very object: hvdtrain.init() has returned it.
        vars(topology).update(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        yield


def _first(value: Any, *arguments: Any, **named: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, value)


def _object(value: Any = None, *arguments: Any, **named: Any) -> Any:
    return value


def _alltoall(tensor: Any, splits: Any = None, *arguments: Any, **named: Any) -> Any:
    return tf.convert_to_tensor(tensor) if splits is None else (tf.convert_to_tensor(tensor), splits)


def _number(value: int) -> Callable[..., int]:
    return lambda *arguments, **named: value


_REDUCTIONS: Sequence[str] = (
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast"),
    *("reducescatter", "grouped_reducescatter"),
)
_OF_ONE_PROCESS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_REDUCTIONS, _first),
    "alltoall": _alltoall,
    "broadcast_object": _object,
    "broadcast_variables": _object,
    "allgather_object": lambda value, *arguments, **named: [value],
    **dict.fromkeys(("size", "local_size", "cross_size"), _number(1)),
    **dict.fromkeys(("rank", "local_rank", "cross_rank"), _number(0)),
}
