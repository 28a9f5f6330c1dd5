"""The synthetic tasks: ResNet-50 and a transformer on random samples, for benchmarks."""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.data import Arrays, Data
from hvdtrain.tasks.task import Task

IMAGE_SHAPE = (224, 224, 3)
NUM_CLASSES = 1000
TOKENS, VOCABULARY_SIZE = 128, 8192
_WIDTH, _HEADS, _BLOCKS = 256, 4, 4
_NUM_SAMPLES = 256


def read_images(data_dir: Path | None) -> Data:
    """Returns 256 random images with one of 1,000 random labels each."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(_NUM_SAMPLES, *IMAGE_SHAPE)).astype(np.float32)
    return Data(Arrays(images, rng.integers(NUM_CLASSES, size=_NUM_SAMPLES).astype(np.int32)), num_classes=NUM_CLASSES)


def read_tokens(data_dir: Path | None) -> Data:
    """Returns 256 sequences of 128 random tokens; the target is the next token."""
    numbers = np.random.default_rng(0).integers(VOCABULARY_SIZE, size=(_NUM_SAMPLES, TOKENS + 1)).astype(np.int32)
    return Data(Arrays(numbers[:, :-1], numbers[:, 1:]), num_classes=VOCABULARY_SIZE)


def make_resnet50(data: Data) -> keras.Model:
    """ResNet-50 (He et al., arXiv:1512.03385), 25.6 million parameters."""
    return keras.applications.ResNet50(weights=None, input_shape=IMAGE_SHAPE, classes=NUM_CLASSES)


def make_transformer(data: Data) -> keras.Model:
    """Four blocks of causal self-attention (Vaswani et al., arXiv:1706.03762), 7.4 million parameters."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    positions = np.arange(TOKENS)[np.newaxis]
    x = layers.Embedding(VOCABULARY_SIZE, _WIDTH)(tokens) + layers.Embedding(TOKENS, _WIDTH)(positions)
    for _ in range(_BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x += layers.Dense(_WIDTH)(layers.Dense(4 * _WIDTH, activation="gelu")(y))
    return keras.Model(tokens, layers.Dense(VOCABULARY_SIZE)(layers.LayerNormalization()(x)), name="transformer")


RESNET50 = Task(
    model=make_resnet50,
    data=read_images,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(),
    optimizer="momentum",
    defaults={"learning_rate": 0.1, "batch_size": 8, "steps": 100},
)

TRANSFORMER = Task(
    model=make_transformer,
    data=read_tokens,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer="adam",
    defaults={"learning_rate": 3e-4, "batch_size": 8, "steps": 100},
)
