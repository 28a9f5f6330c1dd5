"""Functions of a ``tf.data.Dataset`` that draw its order, or which elements it has."""

from collections.abc import Callable

import tensorflow as tf

from hvdtrain.seams import tensorflow_internals


def draws_without_seed(dataset: tf.data.Dataset) -> bool:
    """Whether a filter, or a data set within ``interleave`` or ``flat_map``, depends on numbers without a seed.

    Those that ``map`` draws change elements, as augmentation does, and not which element is which.
    """
    return _has(dataset, tensorflow_internals.FILTER_FUNCTION, _is_random) or _has(
        dataset, tensorflow_internals.MAP_FUNCTION, _shuffles
    )


def _has(dataset: tf.data.Dataset, attribute: str, is_found: Callable[[tf.Operation], bool]) -> bool:
    function = vars(dataset).get(attribute)
    # Those of filter_with_legacy_function have none.
    graph = None if function is None else getattr(function.function, "graph", None)
    return graph is not None and any(is_found(operation) for operation in graph.get_operations())


def _is_random(operation: tf.Operation) -> bool:
    names = {attribute.name for attribute in operation.op_def.attr}
    return {"seed", "seed2"} <= names and operation.get_attr("seed") == operation.get_attr("seed2") == 0


def _shuffles(operation: tf.Operation) -> bool:
    if not operation.type.startswith("ShuffleDataset"):
        return False
    seeds = [tf.get_static_value(operation.inputs[i]) for i in (2, 3)]
    return all(seed is not None and int(seed) == 0 for seed in seeds)
