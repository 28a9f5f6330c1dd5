"""How fast ranks compute, compared with one another."""

import time

import numpy as np
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.system import network
from hvdtrain.training.step_times import skew

_SIZE = 512
_PRODUCTS = 10
_ROUNDS = 60


def measure() -> str:
    """Returns a line that names the slowest rank, and an option that would help. Collective: all ranks must call it."""
    collectives = runtime.current().collectives
    hosts = collectives.allgather(network.host_name())
    return describe(np.stack(collectives.allgather(_seconds_of_rounds())), hosts)


def describe(seconds: np.ndarray, hosts: list[str]) -> str:
    """The line.

    Args:
        seconds: the time of the same computation on each rank, shape ``[ranks, repetitions]``.
        hosts: the host of each rank.
    """
    found = skew(seconds, hosts)
    line = (
        f"slowest rank: {found['slowest_rank']} on {found['slowest_host']}, {found['ratio']:.2f} times the median time"
    )
    if remedy := found["remedy"]:
        return f"{line}; {remedy['option']} may make {remedy['speedup']:.2f} times as many samples/s"
    return line


def _seconds_of_rounds() -> np.ndarray:
    matrix = tf.random.stateless_normal([_SIZE, _SIZE], [0, 1]) / _SIZE**0.5

    def compute() -> float:
        began_s = time.perf_counter()
        product = matrix
        for _ in range(_PRODUCTS):
            product = product @ matrix
        product.numpy()  # waits for the device
        return time.perf_counter() - began_s

    compute()
    return np.array([compute() for _ in range(_ROUNDS)])
