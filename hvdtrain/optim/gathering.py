"""What the code of a training step can ask of all ranks: the samples of the whole batch, and means."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.exclusions import GATHERED_SAMPLES, JIT_COMPILE, refusal_of
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.graph_names import unique_name
from hvdtrain.distributed.program_operations import note_own_reduction
from hvdtrain.distributed.weighted_gradients import of_weighted_losses
from hvdtrain.errors import UsageError
from hvdtrain.optim.global_loss import LossScope, UncompilableLossError, step_scope
from hvdtrain.seams import keras_internals, tensorflow_internals


@tf.autograph.experimental.do_not_convert
def gather(samples: Any) -> Any:
    """Returns the samples of all ranks, in rank order: for losses and layers that compare the samples of a batch.

    A loss of gathered samples is that of the whole batch on every rank, and its gradient is that of one process: the
    gradient of a gathered tensor is summed over ranks, and what an optimizer applies is then averaged. Outside of a
    training step (in evaluation, in prediction, while a model is built) and on one rank it returns what it receives.

    Call it in a ``train_step``, in a layer or a loss, or in a loop of your own while a tape records. All ranks must
    call it, in the same order.

    Args:
        samples: a tensor, or a structure of tensors, with a sample in each row. Ranks may have different numbers.

    Raises:
        UsageError: a tensor has no dimension of samples, or an option keeps ranks from communicating in the forward
            pass.
    """
    flat = tf.nest.flatten(samples)
    scope = step_scope()
    collectives = _ranks_of(scope)
    if collectives is None or not collectives.reduces or any(isinstance(each, keras.KerasTensor) for each in flat):
        return samples
    if scope is not None and scope.excluded_by:
        refusal = refusal_of({each: str(each) for each in (scope.excluded_by[0], GATHERED_SAMPLES)})
        raise _in_one_line(UncompilableLossError if scope.excluded_by[0] == JIT_COMPILE else UsageError, refusal)
    return tf.nest.pack_sequence_as(samples, [_gathered(each, collectives, scope) for each in flat])


@tf.autograph.experimental.do_not_convert
def average(tensors: Any) -> Any:
    """Returns the means over ranks, for values that a loop or a ``train_step`` computes on each rank.

    On one rank, and in a step that this rank makes alone (local SGD), it returns what it receives. All ranks must call
    it, in the same order.

    Args:
        tensors: a dense tensor, or a structure of them, of equal shapes on every rank; None stays None.
    """
    note_own_reduction()
    scope = step_scope()
    collectives = runtime.current().collectives if scope is None else scope.collectives
    flat = tf.nest.flatten(tensors)
    own = [tf.convert_to_tensor(each) for each in flat if each is not None]
    if not collectives.reduces or not own:
        return tensors
    num_ranks = collectives.num_ranks()
    totals = iter(collectives.sum_tensors(own, unique_name("hvdtrain_average")))
    means = [None if each is None else _divided(next(totals), num_ranks) for each in flat]
    return tf.nest.pack_sequence_as(tensors, means)


def _divided(total: tf.Tensor, num_ranks: int | tf.Tensor) -> tf.Tensor:
    return total / tf.cast(num_ranks, total.dtype)


def _ranks_of(scope: LossScope | None) -> Collectives | None:
    """The ranks that make a step together; None if this is not a training step."""
    if scope is not None:
        return scope.collectives
    is_recorded = tensorflow_internals.MAY_RECORD.value()()
    return runtime.current().collectives if is_recorded else None


def _in_one_line(kind: type[UsageError], text: str) -> UsageError:
    """An error that may be raised in a layer."""
    error = kind(text)
    vars(error)[keras_internals.CALL_INFO] = True
    return error


def _gathered(samples: Any, collectives: Collectives, scope: LossScope | None) -> tf.Tensor:
    samples = tf.convert_to_tensor(samples)
    if not samples.shape.rank:
        raise _in_one_line(
            UsageError,
            f"gather needs tensors with a sample in each row. Received: shape {samples.shape}. Gather the values of "
            "the samples, and reduce them then.",
        )
    name = unique_name("hvdtrain_gather")
    if scope is None:
        return collectives.gather_samples(samples, name)
    if (weight := scope.sample_weight()) is not None:
        samples = samples[: tf.where(weight > 0, tf.shape(samples)[0], 0)]  # A filler is no sample.
    return of_weighted_losses(lambda own: collectives.gather_samples(own, name), samples, scope.gradient_weight)
