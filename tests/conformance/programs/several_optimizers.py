"""Programs with an optimizer for each part of the model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

from programs.own_loss import OwnLoss
from programs.samples import FEATURES, LABELS, TARGETS


def network(size, outputs):
    return keras.Sequential([layers.Input((size,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs)])


def update(optimizer, tape, loss, parts):
    variables = [variable for part in parts for variable in part.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class WGAN(keras.Model):
    """Gulrajani et al., arXiv:1704.00028; the factors of interpolation come with the data."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = network(6, 1), network(2, 6)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, real, fake, factors):
        interpolated = real + factors * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            scores = self.discriminator(interpolated, training=True)
        (gradients,) = tape.gradient(scores, [interpolated])
        return ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12) - 1))

    def train_step(self, data):
        (real, noise), factors = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = ops.mean(self.discriminator(fake)) - ops.mean(self.discriminator(real))
                d_loss = cost + 10 * self.gradient_penalty(real, fake, factors)
            update(self.d_optimizer, tape, d_loss, [self.discriminator])
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.discriminator(self.generator(noise, training=True)))
        update(self.g_optimizer, tape, g_loss, [self.generator])
        return {"d_loss": d_loss, "g_loss": g_loss}


def wasserstein_gan_with_gradient_penalty(wrap):
    """WGAN-GP: a gradient by the inputs in the loss, two updates of the critic in a step."""
    model = WGAN()
    model.compile(wrap(optimizers.SGD(0.02)), wrap(optimizers.SGD(0.02)))
    return model, (FEATURES, TARGETS), (LABELS[:, None] / 5).astype(np.float32)


class CycleGAN(keras.Model):
    """Zhu et al., arXiv:1703.10593."""

    def __init__(self):
        super().__init__()
        self.generators = [network(6, 6) for _ in range(2)]
        self.discriminators = [network(6, 1) for _ in range(2)]
        self.mse, self.mae = losses.MeanSquaredError(), losses.MeanAbsoluteError()

    def compile(self, gen_g_optimizer, gen_f_optimizer, disc_x_optimizer, disc_y_optimizer):
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer = gen_g_optimizer, gen_f_optimizer
        self.disc_x_optimizer, self.disc_y_optimizer = disc_x_optimizer, disc_y_optimizer

    def train_step(self, data):
        real_x, real_y = data
        (gen_g, gen_f), (disc_x, disc_y) = self.generators, self.discriminators
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = gen_g(real_x, training=True), gen_f(real_y, training=True)
            cycle_loss = self.mae(real_x, gen_f(fake_y)) + self.mae(real_y, gen_g(fake_x))
            identity_loss = self.mae(real_y, gen_g(real_y)) + self.mae(real_x, gen_f(real_x))
            common = 10 * cycle_loss + 5 * identity_loss
            scores_x, scores_y = disc_x(fake_x), disc_y(fake_y)
            gen_g_loss = self.mse(ops.ones_like(scores_y), scores_y) + common
            gen_f_loss = self.mse(ops.ones_like(scores_x), scores_x) + common
            disc_x_loss = self.discriminator_loss(disc_x(real_x), scores_x)
            disc_y_loss = self.discriminator_loss(disc_y(real_y), scores_y)
        update(self.gen_g_optimizer, tape, gen_g_loss, [gen_g])
        update(self.gen_f_optimizer, tape, gen_f_loss, [gen_f])
        update(self.disc_x_optimizer, tape, disc_x_loss, [disc_x])
        update(self.disc_y_optimizer, tape, disc_y_loss, [disc_y])
        return {"G_loss": gen_g_loss, "F_loss": gen_f_loss, "D_X_loss": disc_x_loss, "D_Y_loss": disc_y_loss}

    def discriminator_loss(self, real, fake):
        return 0.5 * (self.mse(ops.ones_like(real), real) + self.mse(ops.zeros_like(fake), fake))


def cycle_consistent_gan(wrap):
    """CycleGAN: four optimizers and a persistent tape."""
    model = CycleGAN()
    model.compile(*(wrap(optimizers.Adam(2e-3, beta_1=0.5)) for _ in range(4)))
    return model, FEATURES, FEATURES[::-1].copy()


class WideAndDeep(OwnLoss, keras.Model):
    """Cheng et al., arXiv:1606.07792, with an optimizer for the linear part and one for the network."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = keras.Sequential([layers.Input((6,)), layers.Dense(2)]), network(6, 2)
        self.loss_fn = losses.LogCosh()

    def call(self, x):
        return self.wide(x) + self.deep(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_fn(y, self(x))
        update(self.wide_optimizer, tape, loss, [self.wide])
        update(self.deep_optimizer, tape, loss, [self.deep])
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


def optimizers_of_the_model(wrap):
    """A linear part under Ftrl and a network under Adam: optimizers that the model brings."""
    model = WideAndDeep()
    model.wide_optimizer, model.deep_optimizer = wrap(optimizers.Ftrl(0.1)), wrap(optimizers.Adam(1e-2))
    model.compile()
    return model, FEATURES, TARGETS


PROGRAMS = [
    wasserstein_gan_with_gradient_penalty,
    cycle_consistent_gan,
    optimizers_of_the_model,
]
