"""What a ``tf.data.Dataset`` is made of."""

from collections.abc import Iterator

import tensorflow as tf

from hvdtrain.seams import tensorflow_internals


def with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The data set and, recursively, the data sets that it is made of."""
    yield dataset
    inner = vars(dataset).get(tensorflow_internals.INNER_DATASET)
    for each in tensorflow_internals.DATASET_INPUTS.of(dataset)() if inner is None else [inner]:
        yield from with_inputs(each)
