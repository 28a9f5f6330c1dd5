"""On all ranks: between reductions, Horovod's thread leaves the processor to others."""

import time
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf
from models import SHARED_GPUS

import hvdtrain

hvdtrain.init(seed=0, gpus=SHARED_GPUS)


def _times_woken() -> int:
    """How often threads of this process went to sleep until now; a thread that ends meanwhile does not count."""
    woken = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:
            continue
        woken += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return woken


def test_a_rank_without_tensors_pauses():
    hvd.allreduce(tf.constant(1.0), name="last")
    time.sleep(1)
    before = _times_woken()
    time.sleep(1)
    # Every 5 ms, and what other threads do; without pauses, every 0.02 or 0.1 ms.
    assert _times_woken() - before < 1500
