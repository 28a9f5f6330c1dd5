"""When replicas are compared in a loop of a program's own, and which differences are seen."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DivergenceError
from hvdtrain.optim.loop_replicas import LoopReplicas


class TwoRanks(SingleProcessCollectives):
    """Another rank has the same variables, but for one."""

    def __init__(self, differs=None):
        self.differs = differs
        self.num_gathered = 0

    def gather_rows(self, row, name):
        self.num_gathered += 1
        return tf.stack(
            [row, row if self.differs is None else row + tf.one_hot(self.differs, len(row), dtype=row.dtype)]
        )


def test_the_steps():
    ranks = TwoRanks()
    replicas, variable, compared = LoopReplicas(ranks), tf.Variable(1.0), []
    for step in range(800):
        before = ranks.num_gathered
        replicas.compare_now_and_then(tf.constant(step), [variable])
        compared += [step] if ranks.num_gathered > before else []
    assert compared == [16, 272, 528, 784]


DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "complex64", "bool"]


@pytest.mark.parametrize("differs", [None, 0, len(DTYPES) - 1])
def test_variables_of_all_types(differs):
    variables = [tf.Variable(tf.cast([0, 1], dtype), name=f"of_{dtype}") for dtype in DTYPES]
    replicas = LoopReplicas(TwoRanks(differs))

    @tf.function
    def compare():
        replicas.compare_now_and_then(tf.constant(16), variables)

    if differs is None:
        compare()
        return
    with pytest.raises(tf.errors.UnknownError, match=f"After step 16, variable 'of_{DTYPES[differs]}.*' of rank 1"):
        compare()
    with pytest.raises(DivergenceError, match=f"After step 16, variable 'of_{DTYPES[differs]}.*' of rank 1"):
        replicas.compare_now_and_then(tf.constant(16), variables)


def test_a_difference_in_the_last_place_is_seen():
    sums = []

    class Noting(SingleProcessCollectives):
        def gather_rows(self, row, name):
            sums.append(int(row[0]))
            return row[tf.newaxis]

    for value in (1.0, np.nextafter(np.float32(1), np.float32(2)), -1.0):
        LoopReplicas(Noting()).compare_now_and_then(tf.constant(16), [tf.Variable([value, 0.5])])
    assert len(set(sums)) == 3
