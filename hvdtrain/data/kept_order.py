"""Data sets that may yield elements in the order in which they are ready: on each rank in another one."""

import functools
import warnings
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.errors import UsageError
from hvdtrain.seams import tensorflow_internals

_sharded: WeakSet[tf.data.Dataset] = WeakSet()


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data set, whose options do not change its order.

    Raises:
        UsageError: an operation with ``deterministic=False`` changes it, on which options have no effect.
    """
    if any(vars(each).get(tensorflow_internals.DATASET_ORDER) == "false" for each in with_inputs(dataset)):
        raise UsageError(
            "data must be in the same order on all ranks when it is sharded. Received: a data set that map, batch or "
            "interleave makes with deterministic=False. Leave that out, or shard the data before it."
        )
    return _ordered_by_options(dataset)


def note_shard(dataset: tf.data.Dataset) -> None:
    """Notes that ranks shard a data set, so that options that are set later do not change its order."""
    _sharded.add(dataset)


def _ordered_by_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    if dataset.options().deterministic is not False:
        return dataset
    options = tf.data.Options()
    options.deterministic = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Changing the value of option")
        return _with_options(dataset, options)


_with_options = tf.data.Dataset.with_options


@tf.autograph.experimental.do_not_convert
@functools.wraps(_with_options)
def _with_options_in_order(self: tf.data.Dataset, *arguments: Any, **named: Any) -> tf.data.Dataset:
    """``tf.data.Dataset.with_options``: options also hold for the operations before it."""
    dataset = _with_options(self, *arguments, **named)
    return _ordered_by_options(dataset) if any(each in _sharded for each in with_inputs(self)) else dataset


tf.data.Dataset.with_options = _with_options_in_order

_interleaved = tensorflow_internals.INTERLEAVED.value()
_make_interleaved = _interleaved.__init__


@functools.wraps(_make_interleaved)
def _make_and_note_order(self: tf.data.Dataset, *arguments: Any, **named: Any) -> None:
    """As the data sets of TensorFlow's other parallel operations do."""
    _make_interleaved(self, *arguments, **named)
    if named.get("deterministic") is False:
        vars(self)[tensorflow_internals.DATASET_ORDER] = "false"


_interleaved.__init__ = _make_and_note_order
