"""How many steps a program has made, for messages."""

import weakref

import keras
import tensorflow as tf

from hvdtrain.distributed.step_variables import outside_of_step

# A list: another thread may count while one is added.
_optimizers: "list[weakref.ref[keras.optimizers.Optimizer]]" = []
_steps_of_tapes: tf.Variable | None = None


def count_steps_of(optimizer: keras.optimizers.Optimizer) -> None:
    """From now on, the optimizer's steps count."""
    _optimizers.append(weakref.ref(optimizer))


def count_step_of_a_tape() -> tf.Tensor:
    """Counts a step; one that is traced, whenever it runs. Returns the number of steps of tapes before it."""
    global _steps_of_tapes
    if _steps_of_tapes is None:
        with outside_of_step(), tf.device("CPU"):
            _steps_of_tapes = tf.Variable(0, trainable=False, dtype=tf.int64)
    num_steps = _steps_of_tapes.read_value()
    _steps_of_tapes.assign_add(1)
    return num_steps


def counts_steps() -> bool:
    """Whether the program has an optimizer, or a tape, whose steps count."""
    return any(each() is not None for each in _optimizers) or _steps_of_tapes is not None


def num_made_steps() -> int:
    """The number of steps, of the optimizer that has made the most."""
    alive = [optimizer for each in _optimizers if (optimizer := each()) is not None]
    counts = [int(each.iterations.numpy()) for each in alive]
    if _steps_of_tapes is not None:
        counts.append(int(_steps_of_tapes.numpy()))
    return max(counts, default=0)
