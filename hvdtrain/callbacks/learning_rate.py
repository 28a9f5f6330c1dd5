"""Horovod's LearningRateScheduleCallback and LearningRateWarmupCallback for Keras 3."""

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed import runtime
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import UsageError
from hvdtrain.seams import keras_internals


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier``, per epoch or per batch.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a function of the epoch, which is fractional without ``staircase``; or a number m, which stands for
            ``m ** (epoch - start_epoch)``.
        start_epoch: the first epoch that is changed.
        end_epoch: the first epoch after these that is not changed (default: none).
        staircase: change the learning rate once per epoch, not at each batch.
        momentum_correction: when the learning rate changes, change the accumulated momentum in proportion (Goyal et
            al., arXiv:1706.02677). For SGD and RMSprop.
        steps_per_epoch: the number of batches in an epoch, used without ``staircase`` (default: that of ``model.fit``).

    Raises:
        UsageError: when training begins: the learning rate is a schedule, or the number of batches is not known.
    """

    only_sets_learning_rate = True
    """It neither reads values nor stops the training: batches need no reduction for it."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for leaf in leaves_of(self.model):
            # Keras' learning_rate is the current value, also of a schedule.
            learning_rate = keras_internals.LEARNING_RATE.of(leaf)
            if not isinstance(learning_rate, keras.Variable):
                raise UsageError(
                    f"{type(self).__name__} sets the learning rate, which must be a number. Received: an optimizer "
                    f"with {type(learning_rate).__name__}. Make the optimizer with a number, or leave the "
                    "callback out."
                )
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
            if self.steps_per_epoch is None:
                raise UsageError(
                    f"{type(self).__name__} needs the number of batches in an epoch. Received: a data set of unknown "
                    "length. Pass steps_per_epoch to the callback."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.multiplier(self._epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, factor: float) -> None:
        new = self.initial_lr * factor
        for leaf in leaves_of(self.model):
            old = float(keras.ops.convert_to_numpy(leaf.learning_rate))
            leaf.learning_rate = new
            if self.momentum_correction and old > 0 and new != old:
                for velocity in _velocities(leaf):
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs, batch by batch.

    Args:
        initial_lr: the learning rate after warm-up, for the batches of all ranks together.
        warmup_epochs: number of epochs of warm-up.
        momentum_correction: as in :class:`LearningRateScheduleCallback`.
        steps_per_epoch: the number of batches (default: that of ``model.fit``).
        verbose: 1: rank 0 prints when warm-up has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        size = runtime.current().topology.size

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # The last batch of warm-up has the full rate.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 + done * (size - 1)) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch == epoch + 1 and runtime.current().topology.rank == 0:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            print(f"Epoch {epoch + 1}: finished learning-rate warm-up at {rate:g}.")


def _velocities(optimizer: Any) -> list[keras.Variable]:
    """The variables in which an optimizer accumulates its updates, learning rate included."""
    # Scaling them has the effect of scaling the momentum, which Keras compiles into the step, for one update.
    if not getattr(optimizer, "momentum", 0) or not optimizer.built:
        return []
    if hasattr(optimizer, "momentums"):
        return list(optimizer.momentums)
    momentums = keras_internals.MOMENTUMS
    return list(momentums.of(optimizer)) if momentums.is_in(optimizer) else []
