"""How each program is broken, and what hvdtrain must report then.

A break replaces one mechanism of hvdtrain, or something that programs do, by what is wrong on several ranks. In one
process it is right, or has no effect: the check compares with that.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras import layers, ops
from programs import (
    adapted_weights,
    compiled_models,
    generative_models,
    metric_learning,
    own_train_steps,
    reinforcement_learning,
    sequence_models,
    several_optimizers,
    used_gradients,
    vision_models,
    whole_batch,
)
from programs.own_loss import OwnLoss

import hvdtrain
from hvdtrain.distributed import gradient_allreduce, gradient_reduction
from hvdtrain.distributed.horovod import HorovodCollectives
from hvdtrain.distributed.optimizers import build_optimizer, optimizer_variables
from hvdtrain.optim import gathering, global_loss, keras_calls, tape_gradients
from hvdtrain.seams import keras_internals

GLOBAL_BATCH = 16

_LOSS = "the loss of a batch must be the mean of the losses of its samples. Received: "
_GRADIENT = "gradients must be averaged over ranks before anything else uses them. Received: "
REPORTS = {
    "output of a layer": "the output of layer ",
    "loss of `add_loss`": f"{_LOSS}a loss of add_loss",
    "loss": _LOSS,
    "gradient of the tape": "gradients must be means over the samples of a batch. Received: the gradient of ",
    "gradient between tape and update": _GRADIENT,
    "metric": "a metric must be a sum over samples, or a ratio of such sums. Received: ",
    "variable": "a step must update its variables as one process does. Received: ",
    "weight of rank 1": "replicas must be equal. After a step, variable ",
    "frozen weight of rank 1": "replicas must be equal. After a step, frozen variable ",
    "initial weight of rank 1": "replicas must be equal when training begins. Received: variable ",
    "optimizer": "each optimizer that a train_step applies must be distributed. Received: ",
    "batch": "ranks must train on different samples. Received: ",
}
"""What a message is about, and how it begins; the first that fits."""


@dataclasses.dataclass(frozen=True)
class Break:
    """A way to break programs: an object's attribute is replaced while they are trained."""

    words: str
    reports: str
    """What the message must be about."""
    owner: Any
    attribute: str
    replacement: Callable[[Any], Any]
    """Receives the attribute that it replaces."""

    def __call__(self) -> contextlib.AbstractContextManager:
        """Breaks programs in the block."""
        return mock.patch.object(self.owner, self.attribute, self.replacement(getattr(self.owner, self.attribute)))

    def reporting(self, reports: str) -> "Break":
        """The same break, of a program where it shows elsewhere."""
        return dataclasses.replace(self, reports=reports)


def _reducing(reduce):
    """Gradients are reduced by ``reduce(all_ranks, gradients)``, where ``all_ranks`` reduces them as it should."""
    return lambda right: lambda self, config: functools.partial(reduce, right(self, config))


def _sparse_ones_locally(all_ranks, gradients):
    is_local = [gradient_reduction.is_sparse(each) for each in gradients]
    return gradient_reduction.reduced_but_local(all_ranks, gradients, is_local, share=1.0)


def _only_the_first(distribute):
    numbers = itertools.count()
    return lambda optimizer: optimizer if next(numbers) else distribute(optimizer)


def _with_scaled_rate(update):
    def update_with_scaled_rate(self, gradients, variables, learning_rate):
        scope = global_loss.loss_scope()
        update(self, gradients, variables, learning_rate * (1 if scope is None else scope.collectives.size))

    return update_with_scaled_rate


def _shares(add):
    def add_share(model, loss):
        scope = global_loss.loss_scope()
        return add(model, loss) / (1 if scope is None else scope.collectives.size)

    return add_share


def _centred(call):
    @functools.wraps(call)
    def call_and_centre(self, *arguments, **named):
        outputs = call(self, *arguments, **named)
        return outputs - ops.mean(outputs, axis=0)

    return call_and_centre


def _divided_by_the_global_batch(train_step):
    def divided_train_step(self, data):
        share = ops.shape(tf.nest.flatten(data)[0])[0] / GLOBAL_BATCH
        loss_of = self.loss_of
        with mock.patch.object(self, "loss_of", lambda x, y: ops.cast(share, "float32") * loss_of(x, y)):
            return train_step(self, data)

    return divided_train_step


def _with_averaged_gradient(gathered):
    def gather(samples, collectives, scope):
        @tf.custom_gradient
        def averaged(own):
            return tf.identity(own), lambda upstream: upstream / collectives.size

        return gathered(averaged(samples), collectives, scope)

    return gather


def _only_trained_weights(broadcast):
    def broadcast_trained(model):
        build_optimizer(model)
        broadcast([*model.trainable_weights, *optimizer_variables(model)])

    return broadcast_trained


OWN_GRADIENTS = Break(
    "gradients are not averaged",
    "weight of rank 1",
    HorovodCollectives,
    "gradient_reducer",
    _reducing(lambda all_ranks, gradients: gradient_reduction.unreduced(gradients)),
)
OWN_SPARSE_GRADIENTS = Break(
    "sparse gradients are not averaged",
    "weight of rank 1",
    HorovodCollectives,
    "gradient_reducer",
    _reducing(_sparse_ones_locally),
)
REPEATED_ROWS = Break(
    "rows that several ranks have used are not added up",
    "gradient between tape and update",
    gradient_allreduce,
    "with_unique_rows",
    lambda with_unique_rows: lambda gradient: gradient,
)
DIVIDED_TWICE = Break(
    "gradients are divided by the number of ranks twice",
    "gradient between tape and update",
    gradient_reduction,
    "divided",
    lambda divided: lambda reduced, weight: divided(reduced, 2 * weight),
)
FIRST_OPTIMIZER = Break(
    "only the first optimizer is distributed", "optimizer", hvdtrain, "DistributedOptimizer", _only_the_first
)
AFTER_USE = Break(
    "gradients are averaged when they are applied, after their use",
    "gradient between tape and update",
    tape_gradients,
    "_are_used",
    lambda are_used: lambda model, train_step, data: False,
)
AFTER_APPLY = Break(
    "gradients are averaged after `apply` has changed them",
    "gradient between tape and update",
    keras_calls,
    "_reduced_first",
    lambda reduced_first: lambda optimizer, gradients, variables: contextlib.nullcontext(gradients),
)
OWN_SAMPLES = Break(
    "`gather` returns the samples of one rank",
    "loss",
    gathering,
    "_gathered",
    lambda gathered: lambda samples, collectives, scope: samples,
)
AVERAGED_GATHER = Break(
    "`gather` averages its gradient, as Horovod's `allgather` does",
    "gradient of the tape",
    gathering,
    "_gathered",
    _with_averaged_gradient,
)
OWN_COUNTS = Break(
    "each rank divides by its own count",
    "loss",
    global_loss,
    "_share_of_count",
    lambda share_of_count: lambda count, scope: 1.0,
)
SHARES_OF_ADDED_LOSSES = Break(
    "added losses are divided by the number of ranks",
    "loss of `add_loss`",
    keras.Model,
    keras_internals.ADDITIONAL_LOSS.name,
    _shares,
)
CENTRED_DENSE = Break(
    "layers subtract the mean over the samples of one rank", "output of a layer", layers.Dense, "call", _centred
)
CENTRED_CONVOLUTIONS = dataclasses.replace(CENTRED_DENSE, owner=layers.Conv2D)
CENTRED_SERIES = dataclasses.replace(CENTRED_DENSE, owner=layers.Conv1D)
GLOBAL_BATCH_SIZE = Break(
    "the loss is divided by the global batch size", "loss", OwnLoss, "train_step", _divided_by_the_global_batch
)
SCALED_RATE = Break(
    "the learning rate is multiplied by the number of ranks in the update",
    "variable",
    keras.optimizers.Optimizer,
    keras_internals.UPDATE.name,
    _with_scaled_rate,
)
SAME_SAMPLES = Break("data is not sharded", "batch", hvdtrain, "shard", lambda shard: lambda *data: data)
NO_BROADCAST = Break(
    "initial weights are not broadcast",
    "initial weight of rank 1",
    hvdtrain,
    "broadcast",
    lambda broadcast: lambda model: None,
)
FROZEN_WEIGHTS = Break(
    "frozen weights are not broadcast", "frozen weight of rank 1", hvdtrain, "broadcast", _only_trained_weights
)

OF_FAMILIES = {
    compiled_models: OWN_GRADIENTS,
    own_train_steps: DIVIDED_TWICE,
    used_gradients: AFTER_USE,
    whole_batch: OWN_SAMPLES,
    vision_models: CENTRED_DENSE,
    sequence_models: OWN_SPARSE_GRADIENTS,
    generative_models: GLOBAL_BATCH_SIZE,
    metric_learning: CENTRED_DENSE,
    reinforcement_learning: SAME_SAMPLES,
    several_optimizers: FIRST_OPTIMIZER,
    adapted_weights: NO_BROADCAST,
}
"""The break of the programs of each family, unless a program has another one."""

OF_PROGRAMS = {
    "text_classification_with_a_transformer": OWN_SPARSE_GRADIENTS,
    "bidirectional_lstm_with_masks": OWN_SPARSE_GRADIENTS,
    "named_entity_recognition": OWN_COUNTS,
    "language_model_with_masks": OWN_COUNTS,
    "time_series_with_masking": OWN_COUNTS,
    "several_outputs_with_loss_weights": OWN_COUNTS,
    "bags_of_words": REPEATED_ROWS,
    "sequence_to_sequence": REPEATED_ROWS,
    "structured_data": SCALED_RATE,
    "transfer_learning": FROZEN_WEIGHTS,
    "segmentation": OWN_COUNTS.reporting("gradient of the tape"),
    "regularizers_and_constraints": SHARES_OF_ADDED_LOSSES,
    "moving_average_and_schedule": DIVIDED_TWICE,
    "generative_adversarial_network": FIRST_OPTIMIZER,
    "knowledge_distillation": FROZEN_WEIGHTS,
    "custom_train_step_with_added_losses": SHARES_OF_ADDED_LOSSES,
    "sharpness_aware_minimization": AFTER_USE.reporting("weight of rank 1"),
    "norm_of_the_gradient_as_a_metric": AFTER_USE.reporting("metric"),
    "optimizer_with_an_apply_of_its_own": AFTER_APPLY,
    "contrastive_language_image_pretraining": AVERAGED_GATHER,
    "mixture_of_experts": OWN_SAMPLES.reporting("loss of `add_loss`"),
    "inverted_residuals": CENTRED_CONVOLUTIONS,
    "squeeze_and_excitation": CENTRED_CONVOLUTIONS,
    "super_resolution": CENTRED_CONVOLUTIONS,
    "object_detection": CENTRED_CONVOLUTIONS,
    "depth_estimation": GLOBAL_BATCH_SIZE,
    "neural_radiance_field": GLOBAL_BATCH_SIZE,
    "point_cloud_classification": CENTRED_SERIES,
    "masked_language_model": OWN_COUNTS,
    "causal_language_model": OWN_COUNTS,
    "speech_recognition": DIVIDED_TWICE,
    "addition_of_numbers": SCALED_RATE,
    "next_frame_of_a_film": DIVIDED_TWICE,
    "vector_quantized_autoencoder": SHARES_OF_ADDED_LOSSES,
    "pixel_by_pixel": CENTRED_CONVOLUTIONS,
    "circle_loss_of_the_whole_batch": OWN_SAMPLES,
    "barlow_twins": AVERAGED_GATHER,
    "siamese_representation_learning": GLOBAL_BATCH_SIZE,
    "deep_q_learning": SCALED_RATE,
    "proximal_policy_optimization": FIRST_OPTIMIZER,
    "low_rank_adaptation": FROZEN_WEIGHTS,
    "adaptation_of_quantized_weights": FROZEN_WEIGHTS,
    "layers_that_are_frozen": FROZEN_WEIGHTS,
    "weight_normalization": SCALED_RATE,
    "quantization_aware_training": SCALED_RATE,
    "activity_regularizers": SHARES_OF_ADDED_LOSSES,
}


def break_of(program) -> Break:
    """How a program is broken."""
    family = next(each for each in OF_FAMILIES if program in each.PROGRAMS)
    return OF_PROGRAMS.get(program.__name__, OF_FAMILIES[family])


def report_of(message: str) -> str:
    """What a message is about."""
    return next((about for about, begin in REPORTS.items() if message.startswith(begin)), message)
