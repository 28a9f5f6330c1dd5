"""A rank's share of predictions: in memory, or in temporary files."""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError

_BLOCK_BYTES = 16 << 20


class PredictedShare(contextlib.AbstractContextManager["PredictedShare"]):
    """The predictions of a model for some batches, one column for each of its outputs.

    Args:
        in_files: keep them in temporary files, which are deleted at the end of the ``with`` block.
    """

    def __init__(self, model: keras.Model, *, in_files: bool):
        self.structure: Any = None
        """That of the model's outputs; None before the first batch."""
        self._model = model
        self._in_files = in_files
        self._files = contextlib.ExitStack()
        self._columns: list[_Column] = []

    def __exit__(self, *error: object) -> None:
        self._columns = []
        self._files.close()

    def add(self, batch: Any) -> None:
        """Predicts for a batch, as Keras passes it to ``predict_step``.

        Raises:
            UsageError: an output is not dense, or has another shape than before.
        """
        outputs = self._model.predict_function([batch])
        flat = keras.tree.flatten(outputs)
        if self.structure is None:
            self.structure = keras.tree.map_structure(lambda output: 0, outputs)
            self._columns = [_Column(self._new_file()) for _ in flat]
        for column, output in zip(self._columns, flat, strict=True):
            column.append(_as_array(output))

    def blocks(self) -> Iterator[list[np.ndarray]]:
        """All predictions, one array per output, in blocks of at most 16 MiB or one sample."""
        columns = [each.array() for each in self._columns]
        num_samples = len(columns[0]) if columns else 0
        samples_per_block = max(1, _BLOCK_BYTES // max(1, sum(each[:1].nbytes for each in columns)))
        for start in range(0, num_samples, samples_per_block):
            yield [each[start : start + samples_per_block] for each in columns]

    def _new_file(self) -> IO[bytes] | None:
        return self._files.enter_context(tempfile.TemporaryFile()) if self._in_files else None


class _Column:
    """The predictions of one output."""

    def __init__(self, file: IO[bytes] | None):
        self._file = file
        self._batches: list[np.ndarray] = []
        self._first: np.ndarray | None = None
        self._length = 0

    def append(self, batch: np.ndarray) -> None:
        first = self._first = batch[:1] if self._first is None else self._first
        if batch.shape[1:] != first.shape[1:]:
            raise UsageError(
                "the predictions for all samples must have the same shape. Received: "
                f"{first.shape[1:]} and {batch.shape[1:]}. Pad them in the model."
            )
        self._length += len(batch)
        if self._file is None:
            self._batches.append(batch)
        else:
            self._file.write(np.ascontiguousarray(batch).reshape(-1).view(np.uint8).data)  # bfloat16 has no buffer

    def array(self) -> np.ndarray:
        assert self._first is not None
        if self._file is None:
            return np.concatenate(self._batches)
        self._file.flush()
        shape = (self._length, *self._first.shape[1:])
        if not np.prod(shape):
            return np.empty(shape, self._first.dtype)
        return np.memmap(self._file, self._first.dtype, "r", shape=shape)


def _as_array(output: Any) -> np.ndarray:
    if not isinstance(output, tf.Tensor | np.ndarray) or not output.shape:
        raise UsageError(
            "predictions must be dense tensors with a sample in each row. Received: "
            f"{type(output).__name__}. Return dense tensors from predict_step."
        )
    return np.asarray(output)
