"""A ``train_step`` that takes the gradient of a loss of its own."""

import tensorflow as tf

from programs.mean_loss import ReportsMeanLoss


class OwnLoss(ReportsMeanLoss):
    """For models that define ``loss_of(x, y)``, which returns the loss of a batch."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.results(loss)
