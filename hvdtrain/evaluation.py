"""Loss and metrics over all evaluation samples, shared out over the ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import keras
import tensorflow as tf

from hvdtrain.callbacks import RankCallbacks
from hvdtrain.collectives import Collectives
from hvdtrain.data.feed import EvaluationFeed
from hvdtrain.failure import JobWatch
from hvdtrain.metrics import require_sums, results_of_all
from hvdtrain.steps import CompiledSteps
from hvdtrain.weight_average import averaged_weights


class Evaluator:
    """Evaluates a model on every rank's share of the samples.

    Args:
        uses_average: evaluate with the moving average of the weights in the model's place.
        shared: in which the model is that of all ranks together.
        watch: told that it goes on; an evaluation is cut short where the job is to stop.
    """

    def __init__(
        self,
        model: keras.Model,
        steps: CompiledSteps,
        feed: EvaluationFeed,
        collectives: Collectives,
        *,
        uses_average: bool,
        shared: Callable[[], AbstractContextManager[None]],
        watch: JobWatch,
    ):
        self._model = model
        self._steps = steps
        self._feed = feed
        self._collectives = collectives
        self._uses_average = uses_average
        self._shared = shared
        self._watch = watch

    def run(self, callbacks: RankCallbacks, step: int) -> dict[str, float] | None:
        """Each sample is counted once; the results are the same on every rank, which all have to call it.

        Returns:
            None where a rank cut its share short.
        """
        training_state = [variable.numpy() for variable in self._model.metrics_variables]
        average = averaged_weights(self._model.optimizer) if self._uses_average else nullcontext()
        with self._shared(), average:
            callbacks.test_begins()
            self._model.reset_metrics()
            require_sums(self._model)
            is_whole = self._evaluate_share(callbacks, step)
            # Also by a rank that has cut its share short: the others wait for it here.
            results = results_of_all(self._model, self._collectives, is_whole=is_whole)
            if results is not None:
                callbacks.test_ends(results)
        for variable, value in zip(self._model.metrics_variables, training_state, strict=True):
            variable.assign(value)
        return results

    def _evaluate_share(self, callbacks: RankCallbacks, step: int) -> bool:
        """Gives back whether all of it was evaluated."""
        self._feed.restart()
        batch = 0
        while not self._watch.stop_is_coming:
            self._watch.beat("evaluation", step)
            try:
                if callbacks.hear_test_batches:
                    callbacks.test_batch_begins(batch)
                self._steps.evaluate(self._feed.iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                return True
            except tf.errors.OpError as error:
                self._feed.resume_after(error)
                continue
            self._feed.batch_done()
            if callbacks.hear_test_batches:
                callbacks.test_batch_ends(batch)
            batch += 1
        return False
