"""A job of versions.py: steps of the checkout that is on PYTHONPATH."""

import sys

sys.path.pop(0)  # The folder of this file; the checkout has benchmarks of its own.

import hvdtrain

hvdtrain.init(seed=0)

from horovod_job import measure_ranks, trainer_blocks

measure_ranks({"steps": trainer_blocks()})
