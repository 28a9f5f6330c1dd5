"""Files of predictions, written block by block: NumPy's, CSV and Parquet."""

import contextlib
import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from hvdtrain.config.wording import option
from hvdtrain.errors import DataError, UsageError
from hvdtrain.system.atomic_files import replaced_on_success

Write: TypeAlias = Callable[[Sequence[np.ndarray]], None]
"""Appends predictions, one array per output."""


def require_format(path: Path) -> None:
    """Raises UsageError if a file of this name cannot be written."""
    if path.suffix not in _FORMATS:
        raise UsageError(f"{option('output')} must end in {', '.join(_FORMATS)}. Received: {str(path)!r}")
    if path.suffix == ".parquet":
        _pyarrow()


@contextlib.contextmanager
def open_prediction_file(path: Path, structure: Any, num_samples: int) -> Iterator[Write]:
    """Opens a file for predictions; it appears under its name when the block ends without an error.

    Args:
        path: of a file, which is replaced if it exists.
        structure: that of the outputs.

    Raises:
        DataError: it cannot be written.
        UsageError: it cannot hold these outputs.
    """
    names = _names(structure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_on_success(path) as aside, _FORMATS[path.suffix](aside, names, num_samples) as write:
            yield lambda columns: write([_in_full_precision(each) for each in columns])
    except OSError as error:
        raise DataError(f"{option('output')} must be a file that can be written. Received: {path} ({error})") from error


def _names(structure: Any) -> list[str]:
    """Of each output: ``prediction``, its key, or its number."""
    paths = [path for path, _ in keras.tree.flatten_with_path(structure)]
    if len(paths) == 1 and not paths[0]:
        return ["prediction"]
    return ["_".join(str(key) if isinstance(key, str) else f"output_{key}" for key in path) for path in paths]


def _in_full_precision(column: np.ndarray) -> np.ndarray:
    """Half-precision values as float32, without loss: neither CSV nor Parquet has a place for bfloat16."""
    is_half = column.dtype.kind in "fV" and column.dtype.itemsize == 2
    return column.astype(np.float32) if is_half else column


@contextlib.contextmanager
def _npy(path: Path, names: Sequence[str], num_samples: int) -> Iterator[Write]:
    if len(names) > 1:
        raise UsageError(f".npy holds one output. Received: {', '.join(names)}. Use .parquet or .csv.")
    written = 0
    array: np.memmap | None = None

    def write(columns: Sequence[np.ndarray]) -> None:
        nonlocal array, written
        (column,) = columns
        if array is None:
            shape = (num_samples, *column.shape[1:])
            array = np.lib.format.open_memmap(path, mode="w+", dtype=column.dtype, shape=shape)
        array[written : written + len(column)] = column
        written += len(column)

    yield write
    assert array is not None
    assert written == num_samples
    array.flush()


@contextlib.contextmanager
def _csv(path: Path, names: Sequence[str], num_samples: int) -> Iterator[Write]:
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        has_header = False

        def write(columns: Sequence[np.ndarray]) -> None:
            nonlocal has_header
            flat = [each.reshape(len(each), -1) for each in columns]
            if not has_header:
                rows.writerow(
                    name if values.shape[1] == 1 else f"{name}_{i}"
                    for name, values in zip(names, flat, strict=True)
                    for i in range(values.shape[1])
                )
                has_header = True
            rows.writerows([value for values in row for value in values.tolist()] for row in zip(*flat, strict=True))

        yield write


@contextlib.contextmanager
def _parquet(path: Path, names: Sequence[str], num_samples: int) -> Iterator[Write]:
    pa = _pyarrow()
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        writer: Any = None

        def as_column(values: np.ndarray) -> Any:
            column = pa.array(values.reshape(-1))
            for size in reversed(values.shape[1:]):
                column = pa.FixedSizeListArray.from_arrays(column, size)
            return column

        def write(columns: Sequence[np.ndarray]) -> None:
            nonlocal writer
            table = pa.table([as_column(each) for each in columns], list(names))
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)

        yield write


_FORMATS: dict[str, Callable[[Path, Sequence[str], int], contextlib.AbstractContextManager[Write]]] = {
    ".npy": _npy,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow. Received: a Python without it. Install it: HVDTRAIN_EXTRAS=tables launch/run …, or "
            "pip install 'hvdtrain[tables]'"
        ) from error
    return pyarrow
