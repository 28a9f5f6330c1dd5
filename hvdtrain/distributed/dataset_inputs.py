"""What a ``tf.data.Dataset`` is made of."""

from collections.abc import Iterator

import tensorflow as tf

from hvdtrain.seams import tensorflow_internals


def with_inputs(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The data set and the data sets that it is made of, each once."""
    waiting, seen = [dataset], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = vars(each).get(tensorflow_internals.INNER_DATASET)
            waiting += tensorflow_internals.DATASET_INPUTS.of(each)() if inner is None else [inner]
