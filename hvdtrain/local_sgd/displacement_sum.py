"""Sums parameter displacements over ranks: in full precision, or quantized with error feedback."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.quantized_sum import QuantizedSum
from hvdtrain.local_sgd.facts import NUM_FACTS
from hvdtrain.local_sgd.flat_variables import arrays
from hvdtrain.local_sgd.outer_optimizer import Flats

_BITS = {"int8": 8, "int4": 4}


class DisplacementSum:
    """Sums messages over ranks: displacements multiplied by samples, with the facts at the end of the first.

    The rounding errors of this rank's displacements are added to its next message. Only displacements of trained
    variables are quantized: others, such as second moments, must not change their sign.

    Args:
        sync_dtype: ``float32`` (full precision), ``int8`` or ``int4``.
        num_trained: the number of flat tensors with trained variables, which come first.
        name: of the sums of these messages: others may be in progress at the same time.
    """

    def __init__(self, collectives: Collectives, sync_dtype: str, num_trained: int, name: str):
        self._collectives = collectives
        is_quantized = sync_dtype in _BITS and num_trained > 0
        self._quantized = QuantizedSum(collectives, _BITS[sync_dtype]) if is_quantized else None
        self._num_quantized = num_trained if is_quantized else 0
        self._name = name
        self._errors: Flats = ()
        """Per sample: rounds may differ in length."""
        self._next_errors: Flats = ()

    def displacement(self, i: int, value: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
        """This rank's displacement of one tensor, plus its rounding error of the previous round."""
        return value - start + self._errors[i] if i < len(self._errors) else value - start

    def num_bytes(self, message: Flats) -> int:
        """The bytes of a message."""
        whole = sum(each.shape.num_elements() * each.dtype.size for each in message[self._num_quantized :])
        if self._quantized is None:
            return whole
        lengths = [each.shape.num_elements() for each in message[: self._num_quantized]]
        lengths[0] -= NUM_FACTS
        return whole + message[0].dtype.size * NUM_FACTS + sum(map(self._quantized.num_bytes, lengths))

    def sum(self, message: Flats, samples: int) -> Flats:
        """Sums a message over ranks, on any thread; all ranks must call it.

        Args:
            samples: this rank's number of samples, by which its displacements are multiplied.
        """
        if self._quantized is None:
            return self._collectives.sum_tensors(message, self._name)
        first, facts = message[0][:-NUM_FACTS], message[0][-NUM_FACTS:]
        facts, *others = self._collectives.sum_tensors([facts, *message[self._num_quantized :]], self._name)
        trained = [first, *message[1 : self._num_quantized]]
        totals, lost = self._quantized.sum(trained, f"{self._name}_quantized")
        if samples > 0:
            self._next_errors = [each / tf.cast(samples, each.dtype) for each in lost]
        return [tf.concat([totals[0], facts], 0), *totals[1:], *others]

    def merged(self) -> None:
        """Call it when the sum has been merged: only then do its rounding errors replace the previous ones."""
        self._errors = self._next_errors

    def state(self) -> dict[str, Any]:
        """This rank's state for a checkpoint; not to be called while a sum is in progress."""
        return {"errors": arrays(self._errors), "next_errors": arrays(self._next_errors)}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state` returned; None: there are no errors."""
        state = state or {"errors": (), "next_errors": ()}
        self._errors, self._next_errors = (
            [tf.constant(np.asarray(each)) for each in state[name]] for name in ("errors", "next_errors")
        )
