"""Made-up samples for networks of a known size, to measure with: nothing can be learned from them."""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.data import Arrays
from hvdtrain.tasks.task import Data, Task

IMAGE_SHAPE = (224, 224, 3)
NUM_CLASSES = 1000
WORDS, VOCABULARY_SIZE = 128, 8192
_WIDTH, _HEADS, _BLOCKS = 256, 4, 4
_NUM_SAMPLES = 256


def read_images(data_dir: Path | None) -> Data:
    """256 images of noise, each with a label of 1,000."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(_NUM_SAMPLES, *IMAGE_SHAPE)).astype(np.float32)
    return Data(Arrays(images, rng.integers(NUM_CLASSES, size=_NUM_SAMPLES).astype(np.int32)), num_classes=NUM_CLASSES)


def read_words(data_dir: Path | None) -> Data:
    """256 sequences of 128 numbers, and the number that follows each."""
    numbers = np.random.default_rng(0).integers(VOCABULARY_SIZE, size=(_NUM_SAMPLES, WORDS + 1)).astype(np.int32)
    return Data(Arrays(numbers[:, :-1], numbers[:, 1:]), num_classes=VOCABULARY_SIZE)


def make_resnet50(data: Data) -> keras.Model:
    """ResNet-50 (He et al., arXiv:1512.03385), 25.6 million parameters."""
    return keras.applications.ResNet50(weights=None, input_shape=IMAGE_SHAPE, classes=NUM_CLASSES)


def make_transformer(data: Data) -> keras.Model:
    """Four blocks of causal self-attention (Vaswani et al., arXiv:1706.03762), 7.4 million parameters."""
    words = keras.Input((WORDS,), dtype="int32")
    places = np.arange(WORDS)[np.newaxis]
    x = layers.Embedding(VOCABULARY_SIZE, _WIDTH)(words) + layers.Embedding(WORDS, _WIDTH)(places)
    for _ in range(_BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x += layers.Dense(_WIDTH)(layers.Dense(4 * _WIDTH, activation="gelu")(y))
    return keras.Model(words, layers.Dense(VOCABULARY_SIZE)(layers.LayerNormalization()(x)), name="transformer")


RESNET50 = Task(
    model=make_resnet50,
    data=read_images,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(),
    optimizer="momentum",
    defaults={"learning_rate": 0.1, "batch_size": 8, "steps": 100},
)

TRANSFORMER = Task(
    model=make_transformer,
    data=read_words,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer="adam",
    defaults={"learning_rate": 3e-4, "batch_size": 8, "steps": 100},
)
