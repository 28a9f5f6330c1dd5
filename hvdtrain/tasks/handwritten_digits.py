"""Handwritten digits that hvdtrain ships, so that it can train on real data where nothing can be downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(its test set), CC BY 4.0.
"""

from pathlib import Path

import numpy as np

_FILE = Path(__file__).with_name("digits.npz")


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns 1,797 images of 8x8 pixels with values from 0 to 16, and their labels, both as uint8."""
    with np.load(_FILE) as file:
        return file["images"], file["labels"]
