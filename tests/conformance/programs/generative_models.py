"""Programs that learn to generate data; the noise comes with the data."""

import keras
import numpy as np
from keras import layers, ops, optimizers

from programs.own_loss import OwnLoss
from programs.samples import FEATURES, IMAGES, LABELS

NOISE = IMAGES[::-1].copy()
TIMES = ((np.arange(len(IMAGES)) * 7 % len(IMAGES) + 0.5) / len(IMAGES)).astype(np.float32)


class VectorQuantizer(layers.Layer):
    """Van den Oord et al., arXiv:1711.00937; its gradient passes straight through."""

    def build(self, shape):
        self.book = self.add_weight(shape=(8, shape[-1]), initializer="random_uniform")

    def call(self, x):
        distances = ops.sum(ops.square(x[..., None, :] - self.book), axis=-1)
        quantized = ops.matmul(ops.one_hot(ops.argmin(distances, axis=-1), 8), self.book)
        self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(quantized) - x)))
        self.add_loss(ops.mean(ops.square(quantized - ops.stop_gradient(x))))
        return x + ops.stop_gradient(quantized - x)


def vector_quantized_autoencoder(wrap):
    """VQ-VAE: a code book, its losses and a gradient that passes straight through."""
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(8, 3, strides=2, activation="relu", padding="same"),
            layers.Conv2D(4, 1),
            VectorQuantizer(),
            layers.Conv2DTranspose(3, 3, strides=2, padding="same"),
        ]
    )
    model.compile(wrap(optimizers.SGD(0.1)), "mse")
    return model, IMAGES, IMAGES


def noise_network():
    images, times = layers.Input((8, 8, 3)), layers.Input(())
    angles = times[:, None] * np.float32([1, 2, 4, 8])
    time = layers.Dense(8)(ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1))
    x = layers.Conv2D(8, 3, padding="same")(images) + layers.Reshape((1, 1, 8))(time)
    x = x + layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    return keras.Model([images, times], layers.Conv2D(3, 1)(x))


class Diffusion(OwnLoss, keras.Model):
    """Song et al., arXiv:2010.02502; a second network follows the first one."""

    def __init__(self):
        super().__init__()
        self.network, self.average_network = noise_network(), noise_network()
        self.average_network.trainable = False
        self.average_network.set_weights(self.network.get_weights())

    def loss_of(self, x, y):
        images, noise, times = x
        angles = times[:, None, None, None] * np.pi / 2
        noisy = ops.cos(angles) * images + ops.sin(angles) * noise
        return ops.mean(ops.abs(noise - self.network([noisy, times], training=True)))

    def train_step(self, data):
        results = super().train_step(data)
        for weight, average in zip(self.network.weights, self.average_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return results


def denoising_diffusion(wrap):
    """Denoising diffusion: sinusoidal embeddings of time, a moving average of the network in the train_step."""

    model = Diffusion()
    model.compile(optimizer=wrap(optimizers.SGD(0.3, momentum=0.9)))
    return model, (IMAGES, NOISE, TIMES), LABELS


class RealNVP(OwnLoss, keras.Model):
    """Dinh et al., arXiv:1605.08803."""

    def __init__(self):
        super().__init__()
        self.masks = [np.float32([i % 2, 1 - i % 2] * 3) for i in range(4)]
        self.couplings = []
        for _ in self.masks:
            inputs = layers.Input((6,))
            x = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
            self.couplings.append(keras.Model(inputs, [layers.Dense(6, activation="tanh")(x), layers.Dense(6)(x)]))

    def call(self, x):
        log_determinant = 0.0
        for mask, coupling in zip(self.masks, self.couplings, strict=True):
            scale, shift = ((1 - mask) * each for each in coupling(x * mask))
            x = x * mask + (1 - mask) * (x * ops.exp(scale) + shift)
            log_determinant += ops.sum(scale, axis=1)
        return x, log_determinant

    def loss_of(self, x, y):
        z, log_determinant = self(x)
        return -ops.mean(-0.5 * ops.sum(ops.square(z) + np.log(2 * np.pi), axis=1) + log_determinant)


def normalizing_flow(wrap):
    """RealNVP: affine couplings; the negative logarithm of the likelihood."""
    model = RealNVP()
    model.compile(optimizer=wrap(optimizers.Adam(1e-3)))
    return model, FEATURES, LABELS


class MaskedConvolution(layers.Layer):
    """Van den Oord et al., arXiv:1601.06759: each pixel sees only those before it."""

    def __init__(self, filters, sees_itself):
        super().__init__()
        self.convolution = layers.Conv2D(filters, 3, padding="same")
        self.sees_itself = sees_itself

    def build(self, shape):
        self.convolution.build(shape)
        self.mask = np.zeros(self.convolution.kernel.shape, np.float32)
        self.mask[0], self.mask[1, : 1 + self.sees_itself] = 1, 1

    def call(self, x):
        self.convolution.kernel.assign(self.convolution.kernel * self.mask)
        return self.convolution(x)


def pixel_by_pixel(wrap):
    """PixelCNN: convolutions that mask their kernels when they are called."""
    inputs = layers.Input((8, 8, 3))
    x = layers.ReLU()(MaskedConvolution(8, sees_itself=False)(inputs))
    x = x + layers.ReLU()(MaskedConvolution(8, sees_itself=True)(x))
    model = keras.Model(inputs, layers.Conv2D(3, 1, activation="sigmoid")(x))
    model.compile(wrap(optimizers.SGD(0.1, momentum=0.9)), "binary_crossentropy")
    images = (IMAGES > 0).astype(np.float32)
    return model, images, images


PROGRAMS = [
    vector_quantized_autoencoder,
    denoising_diffusion,
    normalizing_flow,
    pixel_by_pixel,
]
