"""hvdtrain's step with --jit-compile, in a job of its own.

In a process where XLA has compiled a step, another model's LSTM takes an eighth to a quarter longer without XLA.
"""

import hvdtrain

hvdtrain.init(seed=0)

import horovod.tensorflow as hvd
from blocks import measure, stand_still_between_turns
from trainer_blocks import barrier, most, trainer_blocks

if hvd.size() > 1:
    # Horovod's threads ask each other for work all the time.
    stand_still_between_turns()
measure({"hvdtrain --jit-compile": trainer_blocks(jit_compile=True)}, barrier, most)
