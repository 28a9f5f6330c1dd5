"""Reads what all ranks have in common from a checkpoint."""

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf


class SharedTensors(Mapping[str, np.ndarray]):
    """The tensors of a file in TensorFlow's checkpoint format, read one by one when they are needed.

    Args:
        path: of the file, without the suffix of its index.
    """

    def __init__(self, path: Path):
        # TensorFlow takes the path for a pattern: that of the folder may contain brackets or backslashes. It opens
        # files when they are read, so that the descriptor must live as long as the reader.
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, descriptor)
        self._prefix = f"/proc/self/fd/{descriptor}/{path.name}"
        self._reader = tf.train.load_checkpoint(self._prefix)
        self._dtypes = self._reader.get_variable_to_dtype_map()

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._reader.get_tensor(name))

    def tensor(self, name: str) -> tf.Tensor:
        """The same in TensorFlow's memory: a variable takes it over without a copy."""
        with tf.device("CPU"):
            (tensor,) = tf.raw_ops.RestoreV2(
                prefix=self._prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[self._dtypes[name]]
            )
        return tensor

    def __contains__(self, name: object) -> bool:
        # Mapping's own would read the tensor.
        return name in self._dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)
