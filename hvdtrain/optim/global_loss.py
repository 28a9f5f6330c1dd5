"""Computes the loss of the whole batch from the losses of ranks that each divide by their own count.

Under a mask, with ``ignore_class`` or with ``reduction="mean_with_sample_weight"``, a Keras loss is a sum over the
samples of a batch divided by the number of unmasked positions or by the sum of weights. One process divides by the
count of the whole batch; the mean over ranks of such losses differs from that. Each rank's loss is therefore multiplied
by its share of the count of all ranks, which are summed in the forward pass.
"""

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from hvdtrain.config.exclusions import COUNTED_LOSS, JIT_COMPILE, SCALAR_LOSS, Condition, Option, refusal_of
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.graph_names import unique_name
from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.distributed.weighted_gradients import GradientWeight
from hvdtrain.errors import UsageError
from hvdtrain.seams import keras_internals

_NOT_A_MEAN = "the loss of a batch must be the mean of the losses of its samples, so that ranks can average it"
_REMEDY = (
    "Wrap the loss in hvdtrain.WholeBatch, which computes it of the samples of all ranks; or return one value for each "
    "sample, and mask samples by sample_weight or a Keras mask. To average the losses of the "
    "ranks nevertheless, return the number once for each sample."
)
# Padding may first appear in a later batch.
_NUM_FIRST_CHECKS, _CHECK_EVERY = 100, 100
_TOLERANCE = 1e-4
_SMALL_LOSS = 0.1


@dataclasses.dataclass(frozen=True)
class LossScope:
    """The ranks over which the losses in a training step are combined, while the step is traced."""

    collectives: Collectives
    sample_weight: Callable[[], tf.Tensor | None] = lambda: None
    """The weight by which this rank's loss is multiplied; None if all ranks have the same."""
    gradient_weight: GradientWeight = lambda: None
    """The weight by which this rank's gradients are multiplied, if its loss is not; known in the backward pass."""
    sums_gradients: bool = False
    """Whether gradients are added up over ranks instead of averaged."""
    excluded_by: Sequence[Option] = ()
    """The options that keep ranks from communicating in the forward pass."""


class UncompilableLossError(UsageError):
    """``jit_compile`` excludes the loss. Raised while a step is traced."""


_all_counters: list["weakref.ref[tf.Variable]"] = []
"""Of the steps in which each loss was computed; negative: it is no longer checked."""
_scope: contextvars.ContextVar[LossScope | None] = contextvars.ContextVar("hvdtrain_loss_scope", default=None)


def step_scope() -> LossScope | None:
    """The scope of the training step that is being traced, also of a rank that trains alone."""
    return _scope.get()


def loss_scope() -> LossScope | None:
    """The scope of the training step that is being traced, if it is one of several ranks."""
    scope = _scope.get()
    return scope if scope is not None and scope.collectives.reduces else None


def is_in_train_step() -> bool:
    """Whether a model's ``train_step`` is being traced or run."""
    return _scope.get() is not None


def gradient_weight_of_step() -> tf.Tensor | None:
    """The weight by which this rank's gradients are multiplied later in the step that is traced; None: by none."""
    scope = _scope.get()
    return None if scope is None else scope.gradient_weight()


@contextlib.contextmanager
def losses_over_ranks(scope: LossScope) -> Iterator[None]:
    """Combines the losses that are computed in the block over ranks."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def whole_losses() -> Iterator[None]:
    """In the block, losses are computed of the samples of all ranks, and need not be combined."""
    token = _scope.set(None)
    try:
        yield
    finally:
        _scope.reset(token)


def loss_over_ranks(
    loss: Any, compute: Callable[..., tf.Tensor], y_true: Any, y_pred: Any, sample_weight: Any
) -> tf.Tensor:
    """Computes a Keras loss so that the mean over ranks is the loss of the whole batch.

    Args:
        loss: the ``keras.losses.Loss``.
        compute: its ``__call__``, with the same arguments.
    """
    scope = loss_scope()
    if scope is None:
        return compute(y_true, y_pred, sample_weight)
    with _observed_values(loss) as observed:
        value = compute(y_true, y_pred, sample_weight)
    if loss.reduction == "sum" and not scope.sums_gradients:
        raise UsageError(
            "a loss with reduction='sum' needs DistributedOptimizer(…, op='sum'), because averaging divides it by the "
            f"number of ranks. Received: {loss.name}. Or use reduction='sum_over_batch_size'."
        )
    if loss.reduction in ("none", "sum", None) or not observed:
        return value
    arguments, values = observed[-1]
    if keras.ops.ndim(values) == 0:
        if JIT_COMPILE in scope.excluded_by:
            _refuse(JIT_COMPILE, SCALAR_LOSS, loss)
        check = _require_mean_over_samples(loss, *arguments, value, scope)
        with tf.control_dependencies([check]):
            return tf.identity(value)
    count = _own_count(loss, _mask(y_pred, values), sample_weight)
    if count is None:
        return value
    if scope.excluded_by:
        _refuse(scope.excluded_by[0], COUNTED_LOSS, loss)
    return value * tf.cast(_share_of_count(count, scope), value.dtype)


def _refuse(option: Option, kind: Condition, loss: Any) -> NoReturn:
    refusal = refusal_of({option: str(option), kind: loss.name})
    raise UncompilableLossError(refusal) if option == JIT_COMPILE else UsageError(refusal)


def require_one_number(loss: tf.Tensor) -> None:
    """Refuses a loss that is not reduced: ``tape.gradient`` adds up its values, and ranks average what each adds up.

    Raises:
        UsageError: the loss of a batch is more than one number.
    """
    if loss.shape.rank:
        raise UsageError(
            f"the loss of a batch must be one number. Received: a tensor of shape {loss.shape}, as of a loss with "
            "reduction=None. Use reduction='sum_over_batch_size'."
        )


@contextlib.contextmanager
def _observed_values(loss: Any) -> Iterator[list[tuple[tuple[Any, Any], tf.Tensor]]]:
    """Collects the arguments and values of the loss' ``call``, whose values are not reduced yet."""
    observed: list[tuple[tuple[Any, Any], tf.Tensor]] = []
    call = loss.call

    def observe(y_true: Any, y_pred: Any) -> tf.Tensor:
        values = call(y_true, y_pred)
        observed.append(((y_true, y_pred), values))
        return values

    vars(loss)["call"] = observe
    try:
        yield observed
    finally:
        del vars(loss)["call"]


def _mask(y_pred: Any, values: tf.Tensor) -> tf.Tensor | None:
    """The positions that count: those that neither the model nor the loss masks."""
    mask_of = keras_internals.MASK.value()
    masks = [each for each in map(mask_of, (y_pred, values)) if each is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _own_count(loss: Any, mask: tf.Tensor | None, sample_weight: Any) -> tf.Tensor | None:
    """What this rank's loss is divided by; None if it is the number of its samples, up to a constant factor."""
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = tf.cast(sample_weight, tf.float32)
        if mask is not None:
            kept = tf.cast(mask, tf.float32)
            while weights.shape.rank < kept.shape.rank:
                weights = weights[..., tf.newaxis]
            while kept.shape.rank < weights.shape.rank:
                kept = kept[..., tf.newaxis]
            weights = weights * kept
        return tf.reduce_sum(weights)
    return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))


def _share_of_count(count: tf.Tensor, scope: LossScope) -> tf.Tensor:
    """This rank's share of the count of all ranks, relative to its share of the samples; 0 where there are none."""
    weight = scope.sample_weight()
    weight = tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)
    own = tf.stop_gradient(tf.where(weight > 0, count, 0))  # A filler does not count.
    (totals,) = scope.collectives.sum_tensors([tf.stack([own, weight])], unique_name("hvdtrain_loss"))
    total, total_weight = tf.unstack(totals)
    return tf.math.divide_no_nan(own * total_weight, total * weight)


def _require_mean_over_samples(loss: Any, y_true: Any, y_pred: Any, value: tf.Tensor, scope: LossScope) -> tf.Tensor:
    """Checks in the first steps, and then in some, that a loss that is one number averages over its samples.

    A user's function may divide by its own count, or compare samples of a batch with each other. The number does not
    show this, but it then differs from the mean of the losses of two halves of the batch. It may be equal by chance on
    some ranks: if one rank raises, all do, because the others would wait for it.
    """
    # Kept on the loss: TensorFlow traces a step again for batches of another shape.
    if "hvdtrain_steps" not in vars(loss):
        with outside_of_step(), tf.device("CPU"):
            vars(loss)["hvdtrain_steps"] = tf.Variable(0, dtype=tf.int64, trainable=False)
            _all_counters.append(weakref.ref(vars(loss)["hvdtrain_steps"]))
    counter = vars(loss)["hvdtrain_steps"]
    batch_size = tf.shape(tf.nest.flatten(y_pred)[0])[0]
    half = batch_size // 2
    name = unique_name("hvdtrain_loss_check")

    def part(begin: Any, end: Any) -> tf.Tensor:
        return loss.call(*tf.nest.map_structure(lambda each: each[begin:end], (y_true, y_pred)))

    def mean_of_halves() -> tf.Tensor:
        weight = tf.cast(half / batch_size, value.dtype)
        return weight * part(None, half) + (1 - weight) * part(half, None)

    def check() -> tf.Tensor:
        mean = tf.cond(batch_size > 1, mean_of_halves, lambda: value)
        scale = tf.maximum(tf.abs(mean), tf.abs(value)) + _SMALL_LOSS
        differs = tf.math.is_finite(scale) & (tf.abs(mean - value) > _TOLERANCE * scale)
        num_differing = tf.cast(differs, tf.float32)
        if not scope.excluded_by:
            (num_differing,) = scope.collectives.sum_tensors([num_differing], name)
        tf.debugging.Assert(num_differing < 0.5, [_message(loss), value, mean])
        return tf.constant(True)

    # The same number of steps on all ranks.
    step = counter.read_value()
    is_due = (step >= 0) & ((step < _NUM_FIRST_CHECKS) | (step % _CHECK_EVERY == 0))
    with tf.control_dependencies([tf.cond(is_due, check, lambda: tf.constant(False))]):
        return tf.identity(counter.assign(tf.where(step < 0, step, step + 1)))


def end_checks() -> None:
    """Ends the checks of all losses: ranks that have made different numbers of them are about to train together."""
    for reference in _all_counters:
        if (counter := reference()) is not None:
            counter.assign(-1)


def _message(loss: Any) -> str:
    return (
        f"{_NOT_A_MEAN}. Received: {loss.name}, for which the mean of the losses of two halves of a batch differs from "
        f"that of the whole batch. {_REMEDY}"
    )


def loss_error(error: BaseException) -> UsageError | None:
    """The error to raise if a step raised this because of a loss that is not a mean over samples; otherwise None."""
    text = str(error)
    if not isinstance(error, tf.errors.InvalidArgumentError) or _NOT_A_MEAN not in text:
        return None
    return UsageError(text[text.index(_NOT_A_MEAN) : text.index(_REMEDY)] + _REMEDY)


def with_loss_errors(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``keras.Model.fit``, which raises the error of :func:`loss_error`."""

    @functools.wraps(fit)
    def fit_and_explain(*arguments: Any, **named: Any) -> Any:
        try:
            return fit(*arguments, **named)
        except tf.errors.InvalidArgumentError as error:
            if (refusal := loss_error(error)) is not None:
                raise refusal from None
            raise

    return fit_and_explain
