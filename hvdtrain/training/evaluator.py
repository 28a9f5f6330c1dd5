"""Loss and metrics over all evaluation samples, which are divided among the ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data.feeds import EvaluationFeed
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.row_lookup import unknown_id_error
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.ema import ema_weights
from hvdtrain.training.callbacks import EvaluationCallbacks
from hvdtrain.training.eval_step import EvalStep
from hvdtrain.training.idle_lookups import IdleLookups
from hvdtrain.training.metric_state import require_sums
from hvdtrain.training.metrics import results_if_complete


class Evaluator:
    """Evaluates a model on every rank's share of the samples.

    Args:
        uses_ema: evaluate with the EMA of the weights in place of the weights.
        synchronized: a context in which the model holds synchronized values.
        job_watch: receives heartbeats; an evaluation is cut short if the job has to stop.
        step: of this model (default: one that is compiled now).
        ends_together: raise an error of one rank on all; False: it ends the job.
    """

    def __init__(
        self,
        model: keras.Model,
        feed: EvaluationFeed,
        collectives: Collectives,
        *,
        uses_ema: bool,
        synchronized: Callable[[], AbstractContextManager[None]],
        job_watch: JobWatch,
        step: EvalStep | None = None,
        ends_together: bool = False,
    ):
        self._model = model
        self._step = step or EvalStep(model)
        self._lookups = IdleLookups(model, model.test_step, collectives)
        self._feed = feed
        self._collectives = collectives
        self._uses_ema = uses_ema
        self._synchronized = synchronized
        self._job_watch = job_watch
        self._ends_together = ends_together

    def run(self, callbacks: EvaluationCallbacks, step: int) -> dict[str, Any] | None:
        """Counts each sample once; the results are the same on every rank. All ranks must call it.

        Returns:
            None if a rank cut its share short.
        """
        training_state = [variable.numpy() for variable in self._model.metrics_variables]
        ema = ema_weights(self._model) if self._uses_ema else nullcontext()
        try:
            with self._synchronized(), ema:
                return self._run(callbacks, step)
        finally:
            for variable, value in zip(self._model.metrics_variables, training_state, strict=True):
                variable.assign(value)

    def _run(self, callbacks: EvaluationCallbacks, step: int) -> dict[str, Any] | None:
        callbacks.test_begins()
        self._model.reset_metrics()
        require_sums(self._model)
        evaluate = partial(self._evaluate_share, callbacks, step)
        # A rank that raises no longer answers the lookups of others, which would wait in them.
        together = self._ends_together and not self._lookups.are_needed
        is_complete = on_every_rank(evaluate, self._collectives) if together else evaluate()
        # Also on a rank that has cut its share short: the others wait for it here.
        results = results_if_complete(
            self._model, self._collectives, is_complete=is_complete, returned=self._step.returned
        )
        if results is not None:
            callbacks.test_ends(results)
        return results

    def _evaluate_share(self, callbacks: EvaluationCallbacks, step: int) -> bool:
        """Returns whether the whole share was evaluated."""
        self._feed.restart()
        self._lookups.begin(self._feed.num_batches if self._lookups.are_needed else 0)
        batch = 0
        while not self._job_watch.stop_requested or self._lookups.are_needed:
            self._job_watch.heartbeat("evaluation", step)
            try:
                if callbacks.use_test_batches:
                    callbacks.test_batch_begins(batch)
                self._step.run(self._feed.iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                self._lookups.end(batch, self._feed.iterator.element_spec)
                return True
            except tf.errors.OpError as error:
                if (refusal := unknown_id_error(error)) is not None:
                    raise refusal from None
                self._feed.resume_after(error)
                continue
            self._feed.batch_done()
            if callbacks.use_test_batches:
                callbacks.test_batch_ends(batch)
            batch += 1
        return False
