"""One compiled call of training steps, whatever it meets."""

import keras
import tensorflow as tf

from hvdtrain.data.feed import TrainingFeed
from hvdtrain.gradient_watch import GradientWatch, is_not_finite
from hvdtrain.optimizer import distribution_of
from hvdtrain.steps import CompiledSteps


class TrainingCalls:
    """Makes this rank's steps on its samples."""

    def __init__(self, model: keras.Model, steps: CompiledSteps, feed: TrainingFeed, gradients: GradientWatch):
        self._model = model
        self._steps = steps
        self._feed = feed
        self._gradients = gradients

    @property
    def longest(self) -> int:
        """The most steps that one call may have."""
        return self._steps.steps_per_call

    @property
    def steps_made(self) -> int:
        """Steps that this rank has made."""
        return self._steps.steps_made

    def train_alone(self) -> None:
        """From now on a rank's samples count the same in its steps, however many the other ranks have."""
        self._steps.train_alone()

    def make(self, steps: int) -> None:
        """Makes a call of this many steps, past samples that cannot be read.

        Raises:
            DataError: more samples are unreadable than allowed.
            NonFiniteError: a loss or a gradient is not finite, with ``on_nan='stop'``.
        """
        last_step = self._steps.steps_made + steps
        try:
            self._steps.train(self._feed.iterator, steps)
        except tf.errors.OpError as error:
            self._mend(error, last_step)

    def _mend(self, error: tf.errors.OpError, last_step: int) -> None:
        """Completes a call past samples that cannot be read; the other ranks wait in a reduction meanwhile."""
        while self._steps.steps_made < last_step:
            if is_not_finite(error):
                among = distribution_of(self._model.optimizer).collectives
                raise self._gradients.error(self._steps.steps_made + 1, among) from None
            self._feed.resume_after(error, self._steps.times.micro_batches)
            try:
                self._steps.complete(self._feed.iterator, last_step)
            except tf.errors.OpError as another:
                error = another
