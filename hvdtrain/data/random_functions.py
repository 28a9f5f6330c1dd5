"""Functions of a ``tf.data.Dataset`` that draw its order, or which elements it has."""

import tensorflow as tf

from hvdtrain.seams import tensorflow_internals


def draws_without_seed(dataset: tf.data.Dataset) -> bool:
    """Whether a filter, or a data set within ``interleave`` or ``flat_map``, depends on numbers without a seed.

    Those that ``map`` draws change elements, as augmentation does, and not which element is which.
    """
    predicate = vars(dataset).get(tensorflow_internals.FILTER_FUNCTION)
    if predicate is not None:
        return any(_is_random(operation) for operation in predicate.function.graph.get_operations())
    function = vars(dataset).get(tensorflow_internals.MAP_FUNCTION)
    return function is not None and any(_shuffles(operation) for operation in function.function.graph.get_operations())


def _is_random(operation: tf.Operation) -> bool:
    names = {attribute.name for attribute in operation.op_def.attr}
    return {"seed", "seed2"} <= names and operation.get_attr("seed") == operation.get_attr("seed2") == 0


def _shuffles(operation: tf.Operation) -> bool:
    if not operation.type.startswith("ShuffleDataset"):
        return False
    seeds = [tf.get_static_value(operation.inputs[i]) for i in (2, 3)]
    return all(seed is not None and int(seed) == 0 for seed in seeds)
