"""Refuses different numbers of steps in ``model.fit``: a rank would wait forever for one that has ended."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.agreement import ranks_text
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.noted_samples import samples_noted
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.data_length import lengths_noted, training_length
from hvdtrain.optim.ema import require_whole_ema
from hvdtrain.optim.equal_programs import require_equal_programs
from hvdtrain.optim.pipeline import pipelines_of, require_pipelines
from hvdtrain.optim.rank_policy import require_own_places, require_savable
from hvdtrain.optim.values_of_parts import tell_of_fit

_RULE = "all ranks must make the same number of steps per epoch."
_REMEDY = "Pass the data through hvdtrain.shard, or set steps_per_epoch to what every rank has."
_REPEAT = "Repeat the data (dataset.repeat()), or set steps_per_epoch to what every rank has."


class EqualSteps:
    """Compares the steps of all ranks: their number before training, if it is known, and each epoch's end.

    Raises:
        UsageError: on every rank, if numbers of steps are known and differ; or the optimizer is not distributed.
    """

    def __init__(self, model: keras.Model, steps_per_epoch: int | None, collectives: Collectives):
        self._model = model
        self._steps_per_epoch = steps_per_epoch
        self._collectives = collectives
        everyone = collectives.allgather((steps_per_epoch, training_length()))
        all_ranks, lengths = [steps for steps, _ in everyone], {length for _, length in everyone}
        # All ranks then have the same number of steps in each epoch, also if the data ends before the epoch.
        self._have_equal_data = len(lengths) == 1 and None not in lengths
        if len(set(all_ranks) - {None}) > 1:
            fewest = min(each for each in all_ranks if each is not None)
            found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(all_ranks))
            raise UsageError(
                f"{_RULE} Received: {found}. Rank {all_ranks.index(fewest)} would end its epoch after step {fewest}, "
                f"and the others would wait for it in the next. {_REMEDY}"
            )
        self._steps = require_pipelines(model)[0][1].steps
        if self._steps.activate(ends_together=None in all_ranks):
            model.make_train_function(force=True)

    def epoch_begins(self, epoch: int, *, made_before: int = 0) -> None:
        """Before the first step.

        Args:
            made_before: steps of this epoch that were made before the run was resumed.
        """
        self._epoch = epoch
        self._made_before = made_before
        self._steps.begin()

    def epoch_ends(self) -> None:
        """After the last step of an epoch; all ranks must call it.

        Raises:
            UsageError: the data of a rank has ended before that of others.
        """
        made = self._made_before + self._steps.made
        ended = self._steps.end()
        if len(ended) < self._collectives.size:
            names = ranks_text(ended, [""] * self._collectives.size)
            raise UsageError(
                f"{_RULE} Received: {names} ended epoch {self._epoch + 1} after {made} steps, and other ranks have "
                f"more data. {_REMEDY}"
            )
        if self._steps_per_epoch is None or self._have_equal_data or self._model.stop_training:
            return
        if made < self._steps_per_epoch:
            # Raised on this rank only: others that have more data are in a step that it will not make, and end with
            # the job.
            raise UsageError(
                f"{_RULE} Received: the data of rank {self._collectives.rank} ended in epoch {self._epoch + 1} after "
                f"{made} of {self._steps_per_epoch} steps, and a rank that has more would wait for it. {_REPEAT}"
            )


class RequireEqualRanks(keras.callbacks.Callback):
    """What ``model.fit`` checks without ``hvdtrain.callbacks.distributed``, of each rank's own callbacks and data.

    Args:
        others: this rank's other callbacks.

    Raises:
        UsageError: ranks make different numbers of steps, stop after different epochs, or have different learning
            rates.
    """

    def __init__(self, others: Sequence[keras.callbacks.Callback], collectives: Collectives):
        super().__init__()
        self._others = others
        self._collectives = collectives

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        require_own_places(self._others, self._collectives)
        self._steps = EqualSteps(self.model, self.params.get("steps"), self._collectives)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._has_stopped_in_epoch = False
        self._steps_have_ended = False
        self._steps.epoch_begins(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end_steps()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The last of all callbacks: others have decided.
        self._end_steps()
        if self._has_stopped_in_epoch:
            return  # Other ranks may be in a step.
        require_equal_decisions(
            self.model,
            epoch,
            self._collectives,
            remedy="Each rank's callbacks see its own metrics; pass them through hvdtrain.callbacks.distributed.",
        )

    def _end_steps(self) -> None:
        if self._steps_have_ended:
            return
        self._steps_have_ended = True
        self._has_stopped_in_epoch = bool(self.model.stop_training)
        self._steps.epoch_ends()


def require_equal_decisions(model: keras.Model, epoch: int, collectives: Collectives, *, remedy: str) -> None:
    """Compares, after an epoch, whether ranks stop, and their learning rates. All ranks must call it.

    Raises:
        UsageError: on every rank: they differ.
    """
    rates = [float(each.learning_rate) for each in leaves_of(model)]
    decisions = {"stop_training": bool(model.stop_training), "learning_rate": rates}
    all_ranks = collectives.allgather(decisions)
    for name in decisions:
        values = [each[name] for each in all_ranks]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise UsageError(
                f"callbacks must decide alike on all ranks. Received: {name} after epoch {epoch + 1}: {found}. {remedy}"
            )


def with_equal_ranks(fit: Callable[..., Any]) -> Callable[..., Any]:
    """``keras.Model.fit``, with :class:`RequireEqualRanks` for models that train on several ranks."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_and_compare(model: keras.Model, *arguments: Any, **named: Any) -> Any:
        call = signature.bind(model, *arguments, **named)
        callbacks = call.arguments.get("callbacks") or []
        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        callbacks = callbacks if is_list else tf.nest.flatten(callbacks)
        collectives = next((pipeline.reduce.collectives for _, pipeline in pipelines_of(model)), None)
        if collectives is not None and collectives.size > 1 and not is_list:
            require_whole_ema(model, callbacks)
            require_savable(model, callbacks)
            require_equal_programs(model, call.arguments, collectives)
            if not any(getattr(each, "compares_ranks", False) for each in callbacks):
                tell_of_fit(callbacks)
                call.arguments["callbacks"] = [*callbacks, RequireEqualRanks(callbacks, collectives)]
        try:
            with lengths_noted(), samples_noted(call.arguments):
                return fit(*call.args, **call.kwargs)
        finally:
            for each in callbacks if not is_list else ():
                if hasattr(each, "fit_ends"):
                    each.fit_ends()

    return fit_and_compare
