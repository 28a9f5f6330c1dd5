"""When the parts of a step are measured, with slow operations in place of a GPU's."""

import time

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.system import devices
from hvdtrain.training.step_times import StepTimes


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_reduction_lasts_from_the_last_own_gradient_to_the_last_reduced_one(has_gpu, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: has_gpu)
    times = StepTimes(1)
    batches = iter(tf.data.Dataset.range(100))

    def slowly(seconds: float, after: tf.Tensor) -> tf.Tensor:
        def wait(value):
            time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [after], after.dtype, stateful=False), after.shape)

    @tf.function
    def step():
        batch = tf.cast(times.next_batch(batches), tf.float32)
        gradients = [tf.stack([batch, batch]), slowly(0.2, batch)]
        times.record_reduction(gradients, after=slowly(0.1, tf.reduce_sum(gradients[1])))
        times.end_micro_batch()

    for _ in range(3):
        step()
    rows = times.drain()
    waited, ready, reducing = np.median(rows, axis=0)
    # Not what they last at most: the machine may be busy, and read the clock late between the two.
    assert ready >= 0.2
    assert reducing > 0
    assert np.median(rows[:, 1] + rows[:, 2]) >= 0.3
    assert waited < ready
    assert times.micro_batches == 3
