"""Programs whose ``train_step`` or optimizer uses gradients before they are applied."""

import keras
import tensorflow as tf
from keras import layers, optimizers

from programs.mean_loss import ReportsMeanLoss
from programs.samples import CLASSES, FEATURES, LABELS, cross_entropy


class UsesGradients(ReportsMeanLoss, keras.Model):
    """Its train_step uses the gradients before it applies them: ``used`` says how."""

    used = staticmethod(lambda gradients: gradients)

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        self.optimizer.apply_gradients(zip(self.used(gradients), self.trainable_variables, strict=True))
        return self.results(loss)

    def loss_and_gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


def classifier(kind):
    inputs = layers.Input((6,))
    return kind(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="tanh")(inputs)))


def compiled_classifier(kind, optimizer):
    model = classifier(kind)
    model.compile(optimizer=optimizer, loss=cross_entropy())
    return model, FEATURES, LABELS


class ClippedByGlobalNorm(UsesGradients):
    used = staticmethod(lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0])


def clipping_in_the_train_step(wrap):
    """A train_step clips by the norm of all gradients."""
    return compiled_classifier(ClippedByGlobalNorm, wrap(optimizers.SGD(0.5)))


class SignsOfGradients(UsesGradients):
    used = staticmethod(lambda gradients: [tf.sign(each) for each in gradients])


def signs_of_gradients(wrap):
    """A train_step applies the signs of the gradients."""
    return compiled_classifier(SignsOfGradients, wrap(optimizers.SGD(0.01, momentum=0.9)))


class NormalizedGradients(UsesGradients):
    used = staticmethod(lambda gradients: [each / (tf.norm(each) + 1e-3) for each in gradients])


def normalized_gradients(wrap):
    """A train_step divides each gradient by its norm."""
    return compiled_classifier(NormalizedGradients, wrap(optimizers.SGD(0.1)))


class SharpnessAware(UsesGradients):
    """Foret et al., arXiv:2010.01412."""

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        scale = 0.5 / (tf.linalg.global_norm(gradients) + 1e-12)
        steps = [each * scale for each in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        _, gradients = self.loss_and_gradients(x, y)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.results(loss)


def sharpness_aware_minimization(wrap):
    """Sharpness-aware minimization: the first gradient moves the weights, the second updates them."""
    return compiled_classifier(SharpnessAware, wrap(optimizers.SGD(0.3)))


class AccumulatesGradients(UsesGradients):
    """Updates after every second batch by the sum of gradients, which it clips."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sums = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self.trainable_variables]
        self.num_batches = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        for total, each in zip(self.sums, gradients, strict=True):
            total.assign_add(each)
        is_due = tf.cast(self.num_batches.assign_add(1) % 2 == 0, tf.float32)
        clipped, _ = tf.clip_by_global_norm([is_due * each for each in self.sums], 0.2)
        self.optimizer.apply(clipped, self.trainable_variables)
        for total in self.sums:
            total.assign((1 - is_due) * total)
        return self.results(loss)


def gradients_summed_by_hand(wrap):
    """Gradient accumulation by hand: a train_step sums the gradients of two batches, clips and applies them."""
    return compiled_classifier(AccumulatesGradients, wrap(optimizers.SGD(0.5)))


class LogsGradientNorm(UsesGradients):
    """Applies the gradients as they are, and logs their norm."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.norm = keras.metrics.Mean(name="gradient_norm")

    @property
    def metrics(self):
        return [*super().metrics, self.norm]

    def train_step(self, data):
        x, y = data
        loss, gradients = self.loss_and_gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.norm.update_state(tf.linalg.global_norm(gradients))
        return {**self.results(loss), "gradient_norm": self.norm.result()}


def norm_of_the_gradient_as_a_metric(wrap):
    """A train_step logs the norm of the gradients that it applies."""
    return compiled_classifier(LogsGradientNorm, wrap(optimizers.Adam(0.01)))


class AdaptiveClipping(optimizers.SGD):
    """Brock et al., arXiv:2102.06171: clips each gradient by the norm of its variable."""

    def apply(self, grads, trainable_variables=None):
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        most = [0.02 * tf.maximum(tf.norm(each), 1e-3) for each in variables]
        super().apply([tf.clip_by_norm(g, norm) for g, norm in zip(grads, most, strict=True)], trainable_variables)


def optimizer_with_an_apply_of_its_own(wrap):
    """Adaptive gradient clipping in an optimizer's own apply."""
    return compiled_classifier(keras.Model, wrap(AdaptiveClipping(0.5)))


PROGRAMS = [
    clipping_in_the_train_step,
    signs_of_gradients,
    normalized_gradients,
    sharpness_aware_minimization,
    gradients_summed_by_hand,
    norm_of_the_gradient_as_a_metric,
    optimizer_with_an_apply_of_its_own,
]
