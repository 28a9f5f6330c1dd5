"""The networks of the benchmarks. Does not import TensorFlow: Keras on JAX and on PyTorch run without it."""

import keras
from keras import layers
from samples import BATCH_SIZES, TOKENS, VOCABULARY


def cnn() -> keras.Model:
    """The CIFAR-10 tutorial's convolutional network without normalization, 1,068,298 parameters."""
    return keras.Sequential(
        [
            layers.Input((24, 24, 3)),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Flatten(),
            layers.Dense(384, activation="relu"),
            layers.Dense(192, activation="relu"),
            layers.Dense(10),
        ]
    )


def mlp() -> keras.Model:
    """64-256-256-10, 85,002 parameters: its steps are so short that all overhead shows."""
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


def lstm() -> keras.Model:
    """A text classifier: an embedding of 64, an LSTM of 64, a dense layer."""
    return keras.Sequential(
        [
            layers.Input((TOKENS,), dtype="int32"),
            layers.Embedding(VOCABULARY, 64),
            layers.LSTM(64),
            layers.Dense(10),
        ]
    )


def transformer() -> keras.Model:
    """An embedding of 128, two encoder layers of 4 heads, the mean, a dense layer."""
    tokens = layers.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 128)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        hidden = layers.Dense(256, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(hidden))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


NETWORKS = {make.__name__: (make, BATCH_SIZES[make.__name__]) for make in (cnn, mlp, lstm, transformer)}
"""Name to network and batch size per rank."""


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer, *, jit_compile: bool = False) -> keras.Model:
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return model
