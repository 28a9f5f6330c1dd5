"""What models with a ``train_step`` of their own report."""

import keras


class ReportsMeanLoss:
    """For models: the mean of their losses is their only metric.

    No model itself, because Keras makes all base classes of a functional model functional.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def results(self, loss):
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}
