"""A random batch for each network. Does not import TensorFlow, which PyTorch's benchmark does not have."""

import numpy as np

# Network to batch size per rank.
BATCH_SIZES = {"cnn": 64, "mlp": 32, "lstm": 32, "transformer": 16}
TOKENS, VOCABULARY = 64, 1000
_SHAPES = {"cnn": (24, 24, 3), "mlp": (64,)}


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of 10 classes; texts are token sequences."""
    rng, size = np.random.default_rng(0), BATCH_SIZES[name]
    if name in _SHAPES:
        x = rng.normal(size=(size, *_SHAPES[name])).astype(np.float32)
    else:
        x = rng.integers(0, VOCABULARY, (size, TOKENS)).astype(np.int32)
    return x, rng.integers(0, 10, size).astype(np.int32)
