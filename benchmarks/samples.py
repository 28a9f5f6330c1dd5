"""One made-up batch of each network, without TensorFlow: PyTorch's benchmark has none."""

import numpy as np

# Name to the batch size of a rank.
BATCH_SIZES = {"cnn": 64, "mlp": 32, "lstm": 32, "transformer": 16}
TOKENS, VOCABULARY = 64, 1000
_SHAPES = {"cnn": (24, 24, 3), "mlp": (64,)}


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of 10 classes; texts as numbers of tokens."""
    rng, size = np.random.default_rng(0), BATCH_SIZES[name]
    if name in _SHAPES:
        x = rng.normal(size=(size, *_SHAPES[name])).astype(np.float32)
    else:
        x = rng.integers(0, VOCABULARY, (size, TOKENS)).astype(np.int32)
    return x, rng.integers(0, 10, size).astype(np.int32)
