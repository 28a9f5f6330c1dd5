"""Programs with a ``train_step`` or a ``compute_loss`` of their own."""

import keras
import tensorflow as tf
from keras import layers, losses, ops, optimizers

from programs.samples import CLASSES, FEATURES, LABELS, TARGETS, cross_entropy


class VAE(keras.Model):
    """Variational autoencoder, as published: never called itself; without its noise."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Input((2,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
            reconstruction = ops.mean(ops.sum(ops.square(x - self.decoder(mean)), axis=1))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total)
        self.kl_loss_tracker.update_state(kl)
        return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}


def variational_autoencoder(wrap):
    """Variational autoencoder: a train_step of its own, in a model that is never called."""
    model = VAE()
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)))
    return model, FEATURES, LABELS


class GAN(keras.Model):
    """DCGAN: two optimizers in one step; the noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Input((2,)), layers.Dense(8, activation="tanh"), layers.Dense(6)])
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real, noise = data[0], data[1]
        combined = ops.concatenate([self.generator(noise), real])
        labels = ops.concatenate([ops.ones((ops.shape(real)[0], 1)), ops.zeros((ops.shape(real)[0], 1))])
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros_like(fakes), fakes)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def generative_adversarial_network(wrap):
    """DCGAN: a train_step with two optimizers."""
    model = GAN()
    model.compile(wrap(optimizers.Adam(1e-2)), wrap(optimizers.Adam(5e-3)), losses.BinaryCrossentropy(from_logits=True))
    return model, FEATURES, TARGETS


class Distiller(keras.Model):
    """Knowledge distillation: ``compute_loss`` of its own, a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential([layers.Input((6,)), layers.Dense(16, "relu"), layers.Dense(CLASSES)])
        self.teacher.trainable = False
        self.student = keras.Sequential([layers.Input((6,)), layers.Dense(CLASSES)])
        self.distillation_loss_fn = losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = ops.softmax(self.teacher(x, training=False) / 3)
        distillation = self.distillation_loss_fn(teacher, ops.softmax(y_pred / 3)) * 9
        return 0.1 * super().compute_loss(x, y, y_pred, sample_weight) + 0.9 * distillation


def knowledge_distillation(wrap):
    """Knowledge distillation: a compute_loss of its own, a frozen teacher."""
    model = Distiller()
    model.build((None, 6))
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)), loss=cross_entropy(), metrics=["accuracy"])
    return model, FEATURES, LABELS


class TwoLosses(keras.Model):
    """Customizing fit: ``compute_loss`` in a train_step, ``add_loss`` in a layer."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class SmallActivations(layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * ops.mean(ops.square(inputs)))
        return inputs


def custom_train_step_with_added_losses(wrap):
    """Customizing fit: compute_loss in a train_step, add_loss in a layer."""
    inputs = layers.Input((6,))
    x = SmallActivations()(layers.Dense(16, activation="relu")(inputs))
    model = TwoLosses(inputs, layers.Dense(2)(x))
    model.compile(optimizer=wrap(optimizers.Adam(1e-2)), loss="mse", metrics=["mae"])
    return model, FEATURES, TARGETS


PROGRAMS = [
    variational_autoencoder,
    generative_adversarial_network,
    knowledge_distillation,
    custom_train_step_with_added_losses,
]
