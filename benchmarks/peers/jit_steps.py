"""hvdtrain's step with --jit-compile, in a separate job.

In a process in which XLA has compiled a step, another model's LSTM without XLA takes 12 to 25 % longer.
"""

import os

import hvdtrain

hvdtrain.init(seed=0, threads=int(os.environ["THREADS"]))

from horovod_job import measure_ranks, trainer_blocks

measure_ranks({"hvdtrain --jit-compile": trainer_blocks(jit_compile=True)})
