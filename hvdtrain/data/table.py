"""Samples that are rows of a table: Parquet, Arrow and CSV files, Hugging Face data sets, data frames."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.conversion import converted
from hvdtrain.data.downloads import require_local
from hvdtrain.data.numbered import NumberedSource, Parts, read_with_numpy
from hvdtrain.data.pipeline import Augment
from hvdtrain.errors import DataError, UsageError

if TYPE_CHECKING:
    import pyarrow

Columns = str | Sequence[str] | Mapping[str, str]

_ROWS_COMPARED = 1000


class Table(NumberedSource):
    """Samples that are rows of a table. Requires ``pip install hvdtrain[tables]``.

    Arrow files (``.arrow``, ``.feather``) and Hugging Face data sets are memory-mapped and read batch by batch; Parquet
    and CSV files are read into memory, their columns ``x``, ``y`` and ``sample_weight`` only.

    Args:
        table: a file or a list of files, all of one kind; or a ``pyarrow.Table``, a ``datasets.Dataset`` or a data
            frame (pandas, Polars). The same on every rank.
        x: the inputs: a column; several numeric columns, stacked into one float matrix; or a dict of columns, for
            models with named inputs. Elements are numbers, strings or lists of equal shapes.
        y: the targets, likewise; None for models that train on x alone.
        sample_weight: a column; None weights all samples equally.
        augment: as for :class:`~hvdtrain.data.Arrays`.

    Raises:
        DataError: a file cannot be read, there are no rows, or the first one has missing values.
        UsageError: a column or the kind of table is not known, or pyarrow is not installed.
    """

    def __init__(
        self,
        table: Any,
        *,
        x: Columns,
        y: Columns | None = None,
        sample_weight: str | None = None,
        augment: Augment | None = None,
    ):
        super().__init__(augment)
        if y is None and sample_weight is not None:
            raise UsageError("sample_weight needs y, the targets that it weights. Received: sample_weight without y.")
        self._columns = [each for each in (x, y, sample_weight) if each is not None]
        self._has_weights = sample_weight is not None
        self._rows = _open(table, sorted({name for each in self._columns for name in _names(each)}))
        self.num_samples = len(self._rows)
        if self.num_samples == 0:
            raise DataError("a table must have at least one row. Received: none")
        first = self._batch(np.array([0]))
        self._structure = first
        flat = [tf.type_spec_from_value(tf.constant(each)) for each in tf.nest.flatten(first)]
        self._specs = [tf.TensorSpec((None, *spec.shape[1:]), spec.dtype) for spec in flat]

    def facts(self) -> dict[str, Any]:
        """The number of rows and a digest of up to 1,000 of them."""
        numbers = np.unique(np.linspace(0, self.num_samples - 1, _ROWS_COMPARED).astype(np.int64))
        digest = hashlib.sha256(repr(self._rows.take(numbers).to_pydict()).encode())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads each of these rows separately and returns those that fail."""
        bad = []
        for number in map(int, numbers):
            try:
                self._flat(np.array([number]))
            except Exception as error:
                bad.append(BadSample(number, f"row {number}", str(error)))
        return bad

    def _read(self, numbers: tf.Tensor) -> Parts:
        return tf.nest.pack_sequence_as(self._structure, read_with_numpy(self._flat, numbers, self._specs))

    def _flat(self, numbers: np.ndarray) -> list[np.ndarray]:
        arrays = tf.nest.flatten(self._batch(numbers))
        for array, spec in zip(arrays, self._specs, strict=True):
            if not spec.shape.is_compatible_with(array.shape):
                raise DataError(
                    f"all rows must have the same shapes. Received: {array.shape[1:]}, {spec.shape[1:]} in the first"
                )
        return arrays

    def _batch(self, numbers: np.ndarray) -> Parts:
        rows = self._rows.take(numbers)
        parts = [_arrays(rows, columns) for columns in self._columns]
        if self._has_weights:
            parts[-1] = parts[-1].astype(keras.config.floatx())
        return tuple(parts)


class _ArrowRows:
    """Rows of a ``pyarrow.Table``."""

    def __init__(self, table: "pyarrow.Table"):
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def take(self, numbers: np.ndarray) -> "pyarrow.Table":
        return self._table.take(numbers)


class _DatasetRows:
    """Rows of a ``datasets.Dataset``, which may be a selection of a larger one."""

    def __init__(self, dataset: Any, names: list[str]):
        self._dataset = dataset.select_columns(names).with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, numbers: np.ndarray) -> "pyarrow.Table":
        return self._dataset[numbers.tolist()]


def _open(table: Any, names: list[str]) -> _ArrowRows | _DatasetRows:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "hvdtrain.data.Table needs pyarrow. Received: a Python without it. Install it: HVDTRAIN_EXTRAS=tables "
            "launch/run …, or pip install 'hvdtrain[tables]'"
        ) from error
    if isinstance(table, str | Path):
        table = [table]
    if isinstance(table, list | tuple):
        for path in table:
            require_local("a table's file", path)
        table = pyarrow.concat_tables([_read_file(Path(path), names) for path in table])
    elif hasattr(table, "__arrow_c_stream__") and not isinstance(table, pyarrow.Table):
        table = pyarrow.table(table)
    present = getattr(table, "column_names", None)
    if not isinstance(present, list):
        raise UsageError(
            "table must be files, a pyarrow.Table, a datasets.Dataset or a data frame. Received: "
            f"{type(table).__name__}. For other objects with rows, use hvdtrain.data.RandomAccess."
        )
    _require_columns(names, present)
    if not isinstance(table, pyarrow.Table) and table.format["type"] == "custom":
        raise UsageError(
            "table must be a datasets.Dataset whose rows are read as they are. Received: one with a transform "
            "(set_transform or with_transform). Use hvdtrain.data.RandomAccess(dataset, select), which reads "
            "transformed rows, or dataset.map(…), which stores them."
        )
    return _ArrowRows(table.select(names)) if isinstance(table, pyarrow.Table) else _DatasetRows(table, names)


def _read_file(path: Path, names: list[str]) -> "pyarrow.Table":
    import pyarrow
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".parquet":
            _require_columns(names, parquet.read_schema(path).names, path)
            return parquet.read_table(path, columns=names)
        if path.suffix in (".arrow", ".feather"):
            return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        if path.suffix == ".csv":
            return csv.read_csv(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path} must be a whole {path.suffix} file. Received: {error}") from error
    raise UsageError(f"a table's file must end in .parquet, .arrow, .feather or .csv. Received: {path}")


def _require_columns(names: list[str], present: list[str], path: Path | None = None) -> None:
    if missing := sorted(set(names) - set(present)):
        where = f" in {path}" if path else ""
        raise UsageError(
            f"x, y and sample_weight must be columns of the table. Received: {', '.join(missing)}, not{where} among "
            f"{', '.join(present)}"
        )


def _names(columns: Columns) -> list[str]:
    if isinstance(columns, str):
        return [columns]
    return list(columns.values() if isinstance(columns, Mapping) else columns)


def _arrays(rows: "pyarrow.Table", columns: Columns) -> Any:
    if isinstance(columns, str):
        return _array(rows, columns)
    if isinstance(columns, Mapping):
        return {key: _array(rows, name) for key, name in columns.items()}
    floatx = keras.config.floatx()
    return np.stack([converted(_array(rows, name), floatx, f"column {name}") for name in columns], axis=1)


def _has_missing(column: "pyarrow.ChunkedArray") -> bool:
    """Whether a value is missing, also within lists."""
    from pyarrow import compute, types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(column.null_count) or (is_list and _has_missing(compute.list_flatten(column)))


def _array(rows: "pyarrow.Table", name: str) -> np.ndarray:
    column = rows.column(name)
    if _has_missing(column):
        raise DataError(f"no value may be missing. Received: an empty value in column {name}")
    if not hasattr(column.type, "value_type"):
        return column.to_numpy()
    element = column.type
    while hasattr(element, "value_type"):
        element = element.value_type
    # By way of Python, NumPy checks the shapes of lists of lists.
    try:
        return np.array(column.to_pylist(), element.to_pandas_dtype())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"all rows must have lists of the same shape, without missing values. Received: others in column {name}"
        ) from error
