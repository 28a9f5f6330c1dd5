"""A loss of the whole batch, for losses that are not a mean over samples."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.optim.gathering import gather
from hvdtrain.optim.global_loss import loss_scope, whole_losses
from hvdtrain.seams import keras_internals


@keras.saving.register_keras_serializable(package="hvdtrain")
class WholeBatch(keras.losses.Loss):
    """Computes a loss of the samples of all ranks together: ``model.compile(loss=hvdtrain.WholeBatch(my_loss))``.

    For losses that compare the samples of a batch with each other, or divide by their own sums over the batch:
    contrastive losses, retrieval with negatives from the batch, Dice, ranking. Targets, predictions, weights and masks
    are gathered, and every rank computes the loss of one process. On one rank, and in evaluation, it is the loss
    itself.

    Each rank computes the loss of all samples, and holds their predictions.

    Args:
        loss: a Keras loss, its name, or a function of ``y_true`` and ``y_pred`` that returns one number, or one for
            each sample, whose mean is taken.

    Raises:
        UsageError: the loss sums over the batch, or is not reduced.
    """

    def __init__(self, loss: Any, name: str | None = None):
        found = keras.losses.get(loss)
        self._loss = found if isinstance(found, keras.losses.Loss) else _FunctionLoss(found)
        if self._loss.reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
            raise UsageError(
                f"the loss of a whole batch must be a mean. Received: {self._loss.name} with "
                f"reduction={self._loss.reduction!r}. Use reduction='sum_over_batch_size'."
            )
        super().__init__(name=name or self._loss.name, reduction=self._loss.reduction)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        scope = loss_scope()
        if scope is not None and scope.sums_gradients:
            raise UsageError(
                f"the loss of a whole batch needs gradients that are averaged. Received: {self.name} with op='sum'. "
                "Use op='average'."
            )
        y_true, y_pred, sample_weight = _gathered(y_true, y_pred, sample_weight)
        with whole_losses():
            return self._loss(y_true, y_pred, sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The values of the loss, before they are reduced."""
        return self._loss.call(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        """What a saved model keeps."""
        return {"loss": keras.saving.serialize_keras_object(self._loss), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WholeBatch":
        """Makes the loss that :meth:`get_config` was called on."""
        return cls(keras.saving.deserialize_keras_object(config["loss"]), config["name"])


@tf.autograph.experimental.do_not_convert
def _gathered(y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Gathers what a loss receives, and the mask of the predictions."""
    mask = keras_internals.MASK.value()(y_pred)
    y_true, y_pred, sample_weight, mask = (
        None if each is None else gather(each) for each in (y_true, y_pred, sample_weight, mask)
    )
    if mask is not None:
        keras_internals.SET_MASK.value()(y_pred, mask)
    return y_true, y_pred, sample_weight


@keras.saving.register_keras_serializable(package="hvdtrain")
class _FunctionLoss(keras.losses.Loss):
    """The loss that a function computes."""

    def __init__(self, function: Any, name: str | None = None):
        super().__init__(name=name or function.__name__, reduction="sum_over_batch_size")
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        return {"function": keras.saving.serialize_keras_object(self._function), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "_FunctionLoss":
        return cls(keras.saving.deserialize_keras_object(config["function"]), config["name"])
