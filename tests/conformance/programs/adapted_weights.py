"""Programs whose weights are adapted, frozen, normalized or quantized."""

import keras
import numpy as np
from keras import layers, ops, optimizers

from programs.samples import CLASSES, FEATURES, IMAGES, LABELS, LENGTH, TARGETS, TEXT, WORDS, cross_entropy


def low_rank_adaptation(wrap):
    """LoRA of an embedding and of dense layers; what was there before is frozen."""
    inputs = layers.Input((LENGTH,), dtype="int32")
    embedding, first, head = layers.Embedding(WORDS, 8), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)
    model = keras.Model(inputs, head(first(layers.GlobalAveragePooling1D()(embedding(inputs)))))
    embedding.enable_lora(2)
    first.enable_lora(2)
    model.compile(wrap(optimizers.SGD(1.0, momentum=0.9)), cross_entropy(), metrics=["accuracy"])
    return model, TEXT, LABELS


def adaptation_of_quantized_weights(wrap):
    """QLoRA: a dense layer of 8-bit integers with trained low-rank matrices."""
    base = layers.Dense(16, activation="relu")
    model = keras.Sequential([layers.Input((6,)), base, layers.Dense(CLASSES)])
    base.quantize("int8")
    base.enable_lora(2)
    model.compile(wrap(optimizers.Adam(1e-2)), cross_entropy())
    return model, FEATURES, LABELS


def layers_that_are_frozen(wrap):
    """Fine-tuning: only the normalization layers, the biases and the head of a network are trained."""
    inputs = layers.Input((8, 8, 3))
    convolutions = [layers.Conv2D(4, 3, padding="same", use_bias=False) for _ in range(2)]
    x = inputs
    for each in convolutions:
        x = layers.ReLU()(layers.LayerNormalization()(each(x)))
        each.trainable = False
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    model.compile(wrap(optimizers.SGD(0.1)), cross_entropy())
    return model, IMAGES, LABELS


class Rematerialized(layers.Layer):
    """Dense layers whose outputs are computed again in the backward pass."""

    def build(self, shape):
        self.block = keras.Sequential([layers.Dense(8, activation="tanh") for _ in range(2)])
        self.block.build(shape)

    def call(self, x):
        return keras.remat(self.block)(x)


def rematerialization(wrap):
    """A block under keras.remat: its outputs are computed again in the backward pass."""
    inputs = layers.Input((6,))
    model = keras.Model(inputs, layers.Dense(2)(Rematerialized()(inputs)))
    model.compile(wrap(optimizers.Adam(1e-2)), "mse")
    return model, FEATURES, TARGETS


def spectral_normalization(wrap):
    """Spectral normalization: a step of the power method in each call."""
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.SpectralNormalization(layers.Conv2D(8, 3, strides=2, activation="relu")),
            layers.Flatten(),
            layers.SpectralNormalization(layers.Dense(CLASSES)),
        ]
    )
    model.compile(wrap(optimizers.SGD(0.1)), cross_entropy())
    return model, IMAGES, LABELS


class WeightNormalized(layers.Layer):
    """Salimans and Kingma, arXiv:1602.07868."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.direction = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")
        self.length = self.add_weight(shape=(self.units,), initializer="ones")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros")

    def call(self, x):
        return ops.matmul(x, self.direction * self.length / ops.norm(self.direction, axis=0)) + self.bias


def weight_normalization(wrap):
    """Weight normalization: length and direction are trained apart."""
    inputs = layers.Input((6,))
    model = keras.Model(inputs, WeightNormalized(2)(ops.tanh(WeightNormalized(8)(inputs))))
    model.compile(wrap(optimizers.SGD(0.05, momentum=0.9)), "mse")
    return model, FEATURES, TARGETS


class QuantizationAware(layers.Dense):
    """Rounds its kernel to 8 bits; the gradient passes straight through."""

    def call(self, inputs):
        scale = 127 / ops.max(ops.abs(self.kernel))
        rounded = ops.round(self.kernel * scale) / scale
        return ops.matmul(inputs, self.kernel + ops.stop_gradient(rounded - self.kernel)) + self.bias


def quantization_aware_training(wrap):
    """Layers that round their weights in the forward pass."""
    model = keras.Sequential([layers.Input((6,)), QuantizationAware(8), layers.ReLU(), QuantizationAware(2)])
    model.compile(wrap(optimizers.SGD(0.05)), "mse")
    return model, FEATURES, TARGETS


def pruned_weights(wrap):
    """Sparse training: a constraint keeps the weights that were pruned at zero."""
    is_kept = np.arange(6 * 16).reshape(6, 16) % 3 != 0
    hidden = layers.Dense(16, activation="relu", kernel_constraint=lambda kernel: kernel * is_kept)
    model = keras.Sequential([layers.Input((6,)), hidden, layers.Dense(2)])
    hidden.kernel.assign(hidden.kernel * is_kept)
    model.compile(wrap(optimizers.Lion(1e-3)), "mse")
    return model, FEATURES, TARGETS


def activity_regularizers(wrap):
    """A sparse autoencoder: activity regularizers, and NonNeg weights."""
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, activation="relu", activity_regularizer=keras.regularizers.L1(1e-3)),
            layers.ActivityRegularization(l2=1e-3),
            layers.Dense(6, kernel_constraint=keras.constraints.NonNeg()),
        ]
    )
    model.compile(wrap(optimizers.Adamax(1e-2)), "mse")
    return model, FEATURES, FEATURES


PROGRAMS = [
    low_rank_adaptation,
    adaptation_of_quantized_weights,
    layers_that_are_frozen,
    rematerialization,
    spectral_normalization,
    weight_normalization,
    quantization_aware_training,
    pruned_weights,
    activity_regularizers,
]
