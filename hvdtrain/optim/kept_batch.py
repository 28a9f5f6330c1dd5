"""Keeps the batch of a step, for a check after it."""

from typing import Any

import tensorflow as tf

from hvdtrain.distributed.step_variables import outside_of_step


class KeptBatch:
    """Keeps the first batch that a step receives after :meth:`want`; does nothing in a step before :meth:`enable`."""

    def __init__(self) -> None:
        self._is_wanted: tf.Variable | None = None
        self._batch: Any = None

    def enable(self) -> None:
        """Before steps are traced: batches will be wanted."""
        if self._is_wanted is None:
            with outside_of_step(), tf.device("CPU"):
                self._is_wanted = tf.Variable(False, trainable=False)

    def want(self) -> None:
        """Before a call of compiled steps: keep a batch."""
        assert self._is_wanted is not None
        self._batch = None
        self._is_wanted.assign(True)

    def take(self) -> Any:
        """After the call: the batch; None if no step was made."""
        assert self._is_wanted is not None
        self._is_wanted.assign(False)
        batch, self._batch = self._batch, None
        return batch

    def observe(self, data: Any) -> None:
        """In a step, at its begin."""
        if self._is_wanted is None:
            return
        flat = tf.nest.flatten(data, expand_composites=True)
        tensors = [tf.convert_to_tensor(each) for each in flat if each is not None]

        def keep(*values: tf.Tensor) -> bool:
            remaining = iter(values)
            if self._batch is None:
                kept = [None if each is None else next(remaining) for each in flat]
                self._batch = tf.nest.pack_sequence_as(data, kept, expand_composites=True)
            return True

        tf.cond(
            self._is_wanted.read_value(),
            lambda: tf.py_function(keep, tensors, tf.bool),
            lambda: tf.constant(False),
        )
