"""Prepares Keras callbacks for ``model.fit`` on all ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.metric_average import MetricAverageCallback
from hvdtrain.callbacks.replay import Replay
from hvdtrain.distributed import runtime
from hvdtrain.distributed.adapted_layers import require_equal_adapted_layers
from hvdtrain.distributed.agreement import require_agreement, require_same_call
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import is_accumulator
from hvdtrain.distributed.replica_consistency import require_equal_variables, share_statistics, shared_statistics
from hvdtrain.distributed.shards import whole_variables
from hvdtrain.errors import UsageError
from hvdtrain.optim.ema import require_whole_ema
from hvdtrain.optim.equal_steps import EqualSteps, require_equal_decisions
from hvdtrain.optim.pipeline import require_pipelines
from hvdtrain.optim.rank_policy import (
    PASS_ALL_CALLBACKS,
    TRAIN_BATCH_HOOKS,
    names_on_every_rank,
    only_writes,
    overrides,
    require_savable,
    require_usable,
)
from hvdtrain.seams import keras_internals

_BATCH_HOOKS = [f"on_{phase}_batch_{moment}" for phase in ("train", "test", "predict") for moment in ("begin", "end")]


def distributed(
    callbacks: Sequence[keras.callbacks.Callback] = (), *, collectives: Collectives | None = None
) -> list[keras.callbacks.Callback]:
    """Prepares callbacks for all ranks: ``model.fit(…, callbacks=hvdtrain.callbacks.distributed([…]))``.

    * Callbacks that decide (EarlyStopping, ReduceLROnPlateau, LearningRateScheduler, …, and your own) run on every rank
      and receive the values over all ranks, ``val_…`` included, so that all ranks make the same decisions. If one of
      them stops the training on any rank, it stops on all.
    * Callbacks that write (ModelCheckpoint, CSVLogger, TensorBoard, …, and your own with an attribute
      ``only_on_rank_zero = True``) and the progress bar run on rank 0 only.
    * At the end of an epoch and in its validation, the model has the statistics (BatchNormalization's) of all ranks.
    * Ranks that would make different numbers of steps are refused before the first step.
    * ``model.evaluate(…, callbacks=hvdtrain.callbacks.distributed())``, with each rank's part of the data, returns the
      values over the samples of all ranks, on every rank.

    Your own callback with hooks at training batches costs two small reductions per batch.

    Args:
        callbacks: all callbacks, the same on every rank; those that write may be left out on other ranks than 0.
        collectives: the ranks that train together (default: those of ``hvdtrain.init()``).

    Returns:
        The list to pass to ``model.fit``; on one rank ``callbacks`` themselves.

    Raises:
        UsageError: a callback cannot work on several ranks.
    """
    collectives = collectives or runtime.current().collectives
    callbacks = list(callbacks)
    require_usable(callbacks, "hvdtrain.callbacks.Checkpoint resumes model.fit")
    # Always a list: Keras would call a single callback from several threads.
    is_plain = collectives.size == 1 and not any(isinstance(each, Checkpoint) for each in callbacks)
    return callbacks if is_plain else [DistributedCallbacks(callbacks, collectives)]


class DistributedCallbacks(keras.callbacks.Callback):
    """Calls those callbacks that run on this rank; see :func:`distributed`."""

    compares_ranks = True
    """``model.fit`` adds no further checks."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], collectives: Collectives):
        super().__init__()
        self._collectives = collectives
        self._names = names_on_every_rank(callbacks)
        self._metrics = MetricAverageCallback(collectives)
        checkpoints = [each for each in callbacks if isinstance(each, Checkpoint)]
        if len(checkpoints) > 1:
            raise UsageError(f"a run must have one Checkpoint. Received: {len(checkpoints)}.")
        self._checkpoint = checkpoints[0] if checkpoints else None
        self._replay: Replay | None = None
        callbacks = [each for each in callbacks if each is not self._checkpoint]
        self._all = callbacks
        self._is_alone = collectives.size == 1
        self._own = [each for each in callbacks if collectives.rank == 0 or not only_writes(each)]
        self._is_in_epoch = False
        self.evaluated_values: dict[str, Any] = {}
        """Those of the last ``model.evaluate``, over all ranks."""
        self._statistics = ExitStack()
        self._before_fit = ExitStack()
        self._before_end: Callable[[], None] = _nothing
        for each in self._own:
            if collectives.rank > 0 and isinstance(getattr(each, "verbose", None), int):
                each.verbose = 0  # only rank 0 prints
        # Keras calls hooks at batches only if they are overridden, and then copies the values at each.
        for hook in _BATCH_HOOKS:
            if any(overrides(each, [hook, hook.replace("_train", "")]) for each in self._own):
                setattr(self, hook, partial(self._forward_at_batch, hook))
        # Considers all callbacks, not only those that run on this rank: all ranks must reduce.
        self._decides_at_batches = not self._is_alone and any(_may_decide_at_batches(each) for each in callbacks)
        if self._decides_at_batches or self._checkpoint is not None:
            self.on_train_batch_end = self._end_batch

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if params and self._collectives.rank > 0:
            params["verbose"] = 0  # for the progress bar, which receives them next
        for each in self._with_checkpoint:
            each.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for each in [self._metrics, *self._with_checkpoint]:
            each.set_model(model)

    @property
    def _with_checkpoint(self) -> list[keras.callbacks.Callback]:
        return self._own if self._checkpoint is None else [*self._own, self._checkpoint]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        require_agreement("callbacks", {"those that decide": self._names}, self._collectives, remedy=PASS_ALL_CALLBACKS)
        require_whole_ema(self.model, self._own)
        require_savable(self.model, self._own)
        if not self._is_alone:
            self._steps = EqualSteps(self.model, self.params.get("steps"), self._collectives)
        self._compares_replicas = True
        self._forward("on_train_begin", logs)
        self._resume()

    def _resume(self) -> None:
        self._replay = None
        position = None if self._checkpoint is None else self._checkpoint.begin(self._all)
        if position is None:
            return
        self._before_fit.callback(keras_internals.INITIAL_EPOCH.set, self.model, None)
        if position.has_ended:
            keras_internals.INITIAL_EPOCH.set(self.model, self.params["epochs"])
            self._before_end = position.continue_here
            return
        self._replay = Replay(self.model, position.epoch, position.step, position.continue_here)
        if self._checkpoint is not None and self._checkpoint.reads_data_again:
            self._replay.begin()
        else:
            keras_internals.INITIAL_EPOCH.set(self.model, position.epoch)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        replay = self._replay
        if replay is None or not replay.covers_epoch(epoch):
            self._is_in_epoch = True
            has_begun = replay is not None and replay.covers_begin(epoch)
            if not self._is_alone:
                self._steps.epoch_begins(epoch, made_before=replay.num_passed_steps if replay and has_begun else 0)
                self._metrics.on_epoch_begin(epoch)
        if replay is not None:
            replay.epoch_begins(epoch)
            if replay.covers_begin(epoch):
                return
        if self._checkpoint is not None:
            self._checkpoint.epoch_begins(epoch)
        self._forward("on_epoch_begin", epoch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_in_epoch and not self._is_alone:
            self._metrics.on_test_begin()
            self._meet("starts its validation")
        elif not self._is_alone:
            require_same_call("model.evaluate", self._collectives)
            self._metrics.evaluation_begins()
            self._statistics.enter_context(shared_statistics(self.model, self._collectives))
        self._forward("on_test_begin", logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._is_in_epoch:
            self._statistics.close()
            self.evaluated_values = dict(logs or {}) if self._is_alone else self._metrics.evaluated(logs or {})
            if logs is not None:
                logs.update(self.evaluated_values)
        self._forward("on_test_end", logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._replay is not None and self._replay.covers_epoch(epoch):
            return
        logs = {} if logs is None else logs
        if not self._is_alone and not self._metrics.has_validated:
            self._meet("ends its epoch without a validation")
        self._is_in_epoch = False
        if not self._is_alone:
            self._metrics.on_epoch_end(epoch, logs)
        self._forward("on_epoch_end", epoch, logs)
        self._statistics.close()
        if not self._is_alone:
            self._agree_on_decisions(epoch)
        if self._checkpoint is not None:
            self._checkpoint.epoch_ends(logs)

    def _agree_on_decisions(self, epoch: int) -> None:
        self._agree_on_stopping()
        require_equal_decisions(
            self.model,
            epoch,
            self._collectives,
            remedy="Set it on every rank, by a callback that decides from the values that it receives.",
        )
        if self._compares_replicas:
            # A user's own train_step may apply gradients that were not reduced.
            self._require_equal_replicas()
            self._compares_replicas = False

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._before_end()
        share_statistics(self.model, self._collectives)
        self._forward("on_train_end", logs)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._forward("on_predict_begin", logs)

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._forward("on_predict_end", logs)

    def fit_ends(self) -> None:
        """When ``model.fit`` returns or raises."""
        if self._replay is not None:
            self._replay.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._before_fit.close()
        self._before_end = _nothing

    def _end_batch(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._replay is not None and self._replay.covers(self._epoch, batch):
            return
        logs = {} if logs is None else logs
        if self._decides_at_batches:
            logs.update(self._metrics.batch_values(logs))
        self._forward("on_train_batch_end", batch, logs)
        if self._decides_at_batches:
            self._agree_on_stopping()
        if self._checkpoint is not None:
            self._checkpoint.batch_ends(batch)

    def _forward_at_batch(self, hook: str, batch: int, logs: dict[str, Any] | None = None) -> None:
        is_of_training = hook.startswith("on_train")
        if is_of_training and self._replay is not None and self._replay.covers(self._epoch, batch):
            return
        self._forward(hook, batch, logs)

    def _forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        for each in self._own:
            getattr(each, hook)(*arguments, **named)

    def _meet(self, what: str) -> None:
        """After the last step of an epoch: from here on, the model has the statistics of all ranks."""
        self._steps.epoch_ends()
        places = self._collectives.allgather(what)
        if len(set(places)) > 1:
            found = ", ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
            raise UsageError(
                f"all ranks must validate, and after the same epochs. Received: {found}. Pass validation_data and "
                "validation_freq on every rank; hvdtrain.shard(…, drop_remainder=False) gives each rank its share."
            )
        self._statistics.enter_context(shared_statistics(self.model, self._collectives))

    def _require_equal_replicas(self) -> None:
        require_equal_adapted_layers(self.model, self._collectives, int(self.model.optimizer.iterations.numpy()))
        weights = whole_variables(self.model.trainable_weights)
        by_optimizer = [pipeline.reduce.are_local(weights) for _, pipeline in require_pipelines(self.model)]
        are_local = [any(each) for each in zip(*by_optimizer, strict=True)]
        variables = [variable for variable, local in zip(weights, are_local, strict=True) if not local]
        if not any(are_local):
            variables += whole_variables([v for v in self.model.optimizer.variables if not is_accumulator(v.path)])
        require_equal_variables(
            variables,
            self._collectives,
            when="After the first epoch,",
            cause="It was changed other than by the model's distributed optimizer: wrap every optimizer in "
            "hvdtrain.DistributedOptimizer.",
        )

    def _agree_on_stopping(self) -> None:
        # A callback may decide by its rank's clock: that rank would stop, and the others would wait for it forever.
        (stopping,) = self._collectives.sum([np.array(float(self.model.stop_training), np.float32)])
        self.model.stop_training = bool(stopping)


def _nothing() -> None:
    pass


def _may_decide_at_batches(callback: keras.callbacks.Callback) -> bool:
    if only_writes(callback) or getattr(callback, "only_sets_learning_rate", False):
        return False
    return overrides(callback, TRAIN_BATCH_HOOKS)
