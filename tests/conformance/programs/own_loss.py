"""A ``train_step`` that takes the gradient of a loss of its own."""

import keras
import tensorflow as tf


class OwnLoss:
    """For models: ``loss_of`` returns the loss of a batch.

    No model itself, because Keras makes all base classes of a functional model functional.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def loss_of(self, x, y):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}
