"""What a step changes before its gradients are reduced, so that a step can be repeated with other ranks."""

from collections.abc import Callable

import keras
import tensorflow as tf

from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.distributed.replica_consistency import random_streams


class StepSnapshot:
    """Copies of the variables that the forward pass of a step changes, and of the counters that do not wait for it.

    Weights, slot variables and the EMA need none: they are updated when all gradients are reduced, or not at all.

    Args:
        model: built, with its metrics.
        step: returns the number of the current step; called in the compiled step.
    """

    def __init__(self, model: keras.Model, step: Callable[[], tf.Tensor]):
        weights = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
        counters = [optimizer._iterations for optimizer in leaves_of(model)]
        everything = [*weights, *model.metrics_variables, *random_streams(model), *counters]
        variables = list({id(variable): variable for variable in everything}.values())
        self._copies = [(variable.value, tf.Variable(variable.value, trainable=False)) for variable in variables]
        self._step_now = step
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def take(self) -> None:
        """Call it at the start of each step, in the compiled step."""
        for variable, copy in self._copies:
            copy.assign(variable)
        self._step.assign(self._step_now())

    def undo(self, next_step: int) -> None:
        """Restores the variables if this step was interrupted; call it outside of the compiled step.

        Args:
            next_step: the number of the first step that is not complete.
        """
        if int(self._step.numpy()) == next_step:
            for variable, copy in self._copies:
                variable.assign(copy)
            self._step.assign(0)
