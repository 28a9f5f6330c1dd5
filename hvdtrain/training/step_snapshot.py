"""Copies what a step changes before its gradients are reduced, so that the step can be repeated with other ranks."""

import keras
import tensorflow as tf

from hvdtrain.distributed.optimizers import leaves_of, optimizer_variables, optimizers_of
from hvdtrain.distributed.replica_consistency import random_streams
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.seams import keras_internals
from hvdtrain.training.step_times import StepTimes


class StepSnapshot:
    """Copies of the variables that an interrupted step may have changed, from the start of the step.

    Keras' own ``train_step`` with one optimizer updates weights, slot variables and the EMA when all gradients are
    reduced, or not at all: these need no copy. Several optimizers, or those of a user's own ``train_step``, update them
    one after the other: everything is copied.

    Args:
        model: built, with its metrics.
        times: counts the steps.
    """

    def __init__(self, model: keras.Model, times: StepTimes):
        leaves = leaves_of(model)
        if len(leaves) > 1 or type(model).train_step is not keras.Model.train_step:
            changed = [*model.weights, *optimizer_variables(model)]
            changed += [v for memory in compression_memories(model) for v in memory.variables().values()]
        else:
            changed = [
                v
                for layer in keras_internals.FLATTEN_LAYERS.of(model)()
                for v in keras_internals.NON_TRAINABLE_VARIABLES.of(layer)
            ]
            changed += [keras_internals.ITERATIONS.of(leaves[0]), *_accumulated_gradients(leaves[0])]
            # The loss scale and its counter.
            changed += [
                v for each in optimizers_of(model) if each is not leaves[0] for v in keras_internals.VARIABLES.of(each)
            ]
        everything = [*changed, *model.metrics_variables, *random_streams(model)]
        variables = list({id(variable): variable for variable in everything}.values())
        self._copies = [(variable.value, tf.Variable(variable.value, trainable=False)) for variable in variables]
        self._times = times
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def take(self) -> None:
        """Call it at the start of each micro-batch, in the compiled step."""
        if self._times.micro_batches_per_step == 1:
            self._copy()
        else:
            keras.ops.cond(self._times.begins_step(), self._copy, lambda: None)

    def _copy(self) -> None:
        for variable, copy in self._copies:
            copy.assign(variable)
        self._step.assign(self._times.current_step())

    def undo(self, next_step: int) -> None:
        """Restores the variables if this step was interrupted; call it outside of the compiled step.

        Args:
            next_step: the number of the first step that is not complete.
        """
        if int(self._step.numpy()) == next_step:
            for variable, copy in self._copies:
                variable.assign(copy)
            self._step.assign(0)


def _accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The accumulated gradients of an optimizer, if it is built and accumulates them."""
    gradients = keras_internals.ACCUMULATED_GRADIENTS
    return list(gradients.of(optimizer)) if gradients.is_in(optimizer) else []
