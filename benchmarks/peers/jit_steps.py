"""hvdtrain's step with --jit-compile, in a job of its own.

In a process where XLA has compiled a step, another model's LSTM takes an eighth to a quarter longer without XLA.
"""

import hvdtrain

hvdtrain.init(seed=0)

from horovod_job import measure_ranks, trainer_blocks

measure_ranks({"hvdtrain --jit-compile": trainer_blocks(jit_compile=True)})
