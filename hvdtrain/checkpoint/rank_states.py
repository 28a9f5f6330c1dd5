"""Gathers per-rank state on rank 0, which writes it to a checkpoint, and scatters it when a run resumes."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.checkpoint import plain_values
from hvdtrain.checkpoint.draft import Draft
from hvdtrain.checkpoint.model_state import Assignable
from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.checkpoint.transfer import (
    AnyArray,
    ArrayReader,
    ArrayWriter,
    Spec,
    from_first_rank,
    num_bytes,
    specs_of,
    to_first_rank,
)
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.row_shards import write_rows
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.errors import DataError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank


class Gathered:
    """On rank 0: a draft that holds the arrays of all ranks, or the error that prevented it."""

    def __init__(self, values: Sequence[Any], begin: Callable[[Sequence[Sequence[Spec]]], Draft]):
        self.values = [value for _, value in values]
        """The JSON value of each rank."""
        self._draft: Draft | None = None
        self._error: OSError | None = None
        try:
            self._draft = begin([specs for specs, _ in values])
        except OSError as error:
            self._error = error

    def write(self, rank: int, piece: np.ndarray) -> None:
        """Writes a rank's next bytes. Does not raise: the other ranks continue to send."""
        if self._draft is not None:
            try:
                self._draft.write_rank(rank, piece)
            except OSError as error:
                self._draft, self._error = None, error

    def draft(self) -> Draft:
        """Returns the draft, or raises the error."""
        if self._error is not None:
            raise self._error
        assert self._draft is not None
        return self._draft


def gather(
    arrays: Mapping[str, AnyArray],
    value: Any,
    collectives: Collectives,
    begin: Callable[[Sequence[Sequence[Spec]]], Draft],
) -> Gathered | None:
    """Rank 0 writes the arrays of every rank to a draft. Collective: all ranks must call it.

    Args:
        arrays, value: this rank's arrays, and a JSON value.
        begin: starts a draft for the arrays of all ranks; called on rank 0.

    Returns:
        None on other ranks.
    """
    own = _as_bytes([specs_of(arrays), value])
    received = collectives.alltoall([own, *[own[:0]] * (collectives.size - 1)])
    found = Gathered([_from_bytes(each) for each in received], begin) if collectives.rank == 0 else None
    to_first_rank(list(arrays.values()), collectives, _ignore if found is None else found.write)
    return found


def scatter(
    file: RankFileReader | None,
    values: Sequence[Any],
    variables: Mapping[str, Assignable],
    collectives: Collectives,
) -> Any:
    """Every rank receives the value and the arrays that it had when they were gathered. Collective.

    Args:
        file, values: on rank 0: where the arrays are, and each rank's value, with arrays split off.
        variables: by array name, the variables that arrays are assigned to; other arrays are part of the value.

    Returns:
        This rank's value.
    """
    headers = [_as_bytes([file.specs[rank], value]) for rank, value in enumerate(values)] if file is not None else []
    specs, value = _from_bytes(collectives.alltoall(headers or [_as_bytes(None)[:0]] * collectives.size)[0])
    arrays: dict[str, np.ndarray] = {}

    def complete(name: str, array: np.ndarray) -> None:
        if name in variables:
            variables[name].assign(array)
        else:
            arrays[name] = array

    readers = [] if file is None else [file.reader(rank) for rank in range(collectives.size)]
    tables = {name: partial(write_rows, each) for name, each in variables.items() if row_shard_of(each) is not None}
    _receive(readers, specs, collectives, ArrayWriter(specs, complete, tables))
    return plain_values.join(value, arrays)


def broadcast_arrays(
    arrays: Mapping[str, np.ndarray], specs: Sequence[Spec], collectives: Collectives
) -> dict[str, np.ndarray]:
    """Every rank receives arrays of rank 0. Collective: all ranks must call it.

    Args:
        arrays: used on rank 0 only.
        specs: the specs of the arrays; needed on every rank.
    """
    received: dict[str, np.ndarray] = {}
    readers = [ArrayReader(list(arrays.values())) for _ in range(collectives.size)] if collectives.rank == 0 else []
    _receive(readers, specs, collectives, ArrayWriter(specs, received.__setitem__))
    return received


def _receive(readers: Sequence[Any], specs: Sequence[Spec], collectives: Collectives, writer: ArrayWriter) -> None:
    errors: list[OSError] = []

    def read(rank: int, size: int) -> np.ndarray:
        try:
            return readers[rank].read(size)
        except OSError as error:
            # Raised below: the other ranks wait for the next piece.
            errors.append(error)
            return np.empty(0, np.uint8)

    def require_read() -> None:
        if errors:
            raise DataError(f"a checkpoint must stay readable. Received: {errors[0]}") from errors[0]

    from_first_rank(read, sum(map(num_bytes, specs)), collectives, writer.write)
    on_every_rank(require_read, collectives)


def _as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_bytes(data: np.ndarray) -> Any:
    return json.loads(data.tobytes())


def _ignore(rank: int, piece: np.ndarray) -> None:
    pass
