"""Collectives on values of the user's own, outside of compiled functions: numbers, arrays, structures, any object."""

from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.agreement import require_agreement, require_same_call
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.program_operations import note_own_reduction
from hvdtrain.errors import UsageError

Op: TypeAlias = Literal["mean", "sum", "min", "max"]
_EXTREMES: dict[str, np.ufunc] = {"min": np.minimum, "max": np.maximum}


def reduce(values: Any, op: Op = "mean", *, collectives: Collectives | None = None) -> Any:
    """Combines values of all ranks: ``loss = hvdtrain.reduce(loss)``. All ranks must call it.

    For values that a program computes for itself. In a ``train_step`` or a ``tf.function``, use
    :func:`hvdtrain.average`.

    Args:
        values: a number, an array, a tensor, or a structure of them; of equal structure and shapes on every rank.
        op: ``mean`` (in float64 for integers), ``sum``, ``min`` or ``max``.
        collectives: the ranks that call it (default: those of ``hvdtrain.init()``).

    Returns:
        The same structure: a Python number for each number, otherwise NumPy arrays.

    Raises:
        DisagreementError: on every rank: shapes or dtypes differ.
        UsageError: a value is no number, or a compiled function calls it.
    """
    _require_eager("reduce", "average")
    if op not in ("mean", "sum", *_EXTREMES):
        raise UsageError(f"op must be mean, sum, min or max. Received: {op!r}")
    note_own_reduction()
    ranks = collectives or runtime.current().collectives
    flat = keras.tree.flatten(values)
    arrays = [np.asarray(each) for each in flat]
    if wrong := [each for each, array in zip(flat, arrays, strict=True) if array.dtype.kind not in "biuf"]:
        raise UsageError(
            f"reduce needs numbers. Received: {type(wrong[0]).__name__}. Collect other objects by "
            "hvdtrain.gather_objects."
        )
    specs = {f"value {i}": f"{each.dtype} {each.shape}" for i, each in enumerate(arrays)}
    require_agreement("values of hvdtrain.reduce", {"op": op, **specs}, ranks)
    if op in _EXTREMES:
        everyone = ranks.allgather(arrays)
        results = [_EXTREMES[op].reduce(np.stack(column)) for column in zip(*everyone, strict=True)]
    else:
        # NumPy sums whole numbers and truth values in 64 bits too.
        wide = [each if each.dtype.kind == "f" else each.astype(np.int64) for each in arrays]
        results = ranks.sum(wide)
        if op == "mean":
            results = [total / ranks.size for total in results]
    returned = [
        result.item() if isinstance(each, bool | int | float) else result
        for each, result in zip(flat, results, strict=True)
    ]
    return keras.tree.pack_sequence_as(values, returned)


def gather_objects(value: Any, *, collectives: Collectives | None = None) -> list[Any]:
    """The picklable objects of all ranks, in rank order. All ranks must call it.

    Raises:
        UsageError: a compiled function calls it.
    """
    _require_eager("gather_objects", "gather")
    ranks = collectives or runtime.current().collectives
    require_same_call("hvdtrain.gather_objects", ranks)
    return ranks.allgather(value)


def broadcast_object(value: Any, root_rank: int = 0, *, collectives: Collectives | None = None) -> Any:
    """The picklable object of one rank; what other ranks pass is ignored. All ranks must call it.

    Raises:
        UsageError: there is no such rank, or a compiled function calls it.
    """
    _require_eager("broadcast_object", "broadcast")
    ranks = collectives or runtime.current().collectives
    if not 0 <= root_rank < ranks.size:
        raise UsageError(f"root_rank must be a rank, from 0 to {ranks.size - 1}. Received: {root_rank}")
    require_same_call("hvdtrain.broadcast_object", ranks)
    return ranks.allgather(value if ranks.rank == root_rank else None)[root_rank]


def barrier(*, collectives: Collectives | None = None) -> None:
    """Waits until all ranks have called it.

    Raises:
        UsageError: a compiled function calls it.
    """
    _require_eager("barrier", "average")
    require_same_call("hvdtrain.barrier", collectives or runtime.current().collectives)


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes files."""
    return runtime.current().collectives.rank == 0


def print_once(*values: Any, **options: Any) -> None:
    """Prints on rank 0 only, with the arguments of ``print``."""
    if is_main_process():
        print(*values, **{"flush": True, **options})


def _require_eager(name: str, instead: str) -> None:
    if not tf.executing_eagerly():
        raise UsageError(
            f"hvdtrain.{name} must be called outside of compiled functions. Received: a call while a function is "
            f"compiled. Use hvdtrain.{instead} there, or call it after the step."
        )
