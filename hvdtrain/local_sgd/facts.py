"""Facts that ranks exchange along with their displacements, appended to the first tensor."""

import numpy as np
import tensorflow as tf

SAMPLES, STEPS, LOSS, FINISHED = range(4)
NUM_FACTS = 4


def no_facts() -> np.ndarray:
    """Facts that are all 0."""
    return np.zeros(NUM_FACTS)


def with_facts(tensor: tf.Tensor, *, samples: int, steps: int, loss: float, finished: bool) -> tf.Tensor:
    """Appends this rank's facts."""
    facts = no_facts()
    facts[[SAMPLES, STEPS, LOSS, FINISHED]] = samples, steps, loss, finished
    return tf.concat([tensor, tf.constant(facts, tensor.dtype)], 0)


def split_facts(total: tf.Tensor) -> tuple[tf.Tensor, np.ndarray]:
    """Separates a tensor from the sums of the facts over ranks."""
    return total[:-NUM_FACTS], total[-NUM_FACTS:].numpy().astype(float)
