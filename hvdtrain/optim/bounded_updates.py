"""Updates variables a group at a time, so that the temporary tensors of few of them are in memory at once."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import groups_of_bounded_size
from hvdtrain.distributed.gradient_reduction import Gradient
from hvdtrain.distributed.snapshot import resource_of
from hvdtrain.seams import keras_internals

GROUP_BYTES = 16 << 20
"""Size of a group, or of a larger variable. Their updates follow one another, and each of its operations is large
enough for all threads."""

Update = Callable[[Sequence[Gradient], Sequence[keras.Variable], Any], None]


def update_in_groups(optimizer: keras.optimizers.Optimizer) -> Update:
    """Keras' update of variables, which it makes one by one; of a compiled step, each group waits for the one before.

    Otherwise TensorFlow may begin with the differences and squares of all variables: temporary tensors as large as the
    model. An optimizer that overrides its update keeps it.

    Returns:
        A function of gradients, variables and the learning rate.
    """
    update: Update = keras_internals.UPDATE.of(optimizer)
    if getattr(type(optimizer), keras_internals.UPDATE.name) is not keras_internals.UPDATE.of(
        keras.optimizers.Optimizer
    ):
        return update

    def update_groups(gradients: Sequence[Gradient], variables: Sequence[keras.Variable], learning_rate: Any) -> None:
        if tf.executing_eagerly():
            update(gradients, variables, learning_rate)
            return
        # Where nothing is reduced, the gradient of the last variable comes first.
        resources = [resource_of(each) for each in reversed(variables)]
        before: list[tf.Variable] = []
        for group in groups_of_bounded_size(resources, GROUP_BYTES):
            members = [len(variables) - 1 - i for i in group]
            # Reading a variable would copy it as a whole if its rows are updated in place.
            with tf.control_dependencies([each.is_initialized() for each in before]):
                update([gradients[i] for i in members], [variables[i] for i in members], learning_rate)
            before = [resources[i] for i in group]

    return update_groups
