"""Keras on PyTorch with keras.distribution.DataParallel, a process per rank; needs an environment with Keras 3.16."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as distributed
from blocks import NETWORK, Block, measure
from networks import NETWORKS, compiled
from samples import batch

torch.set_num_threads(int(os.environ["THREADS"]))
keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


def block_of(*, jit_compile: bool) -> Block:
    model = compiled(NETWORKS[NETWORK][0](), keras.optimizers.SGD(1e-3, momentum=0.9), jit_compile=jit_compile)
    # Builds the model's state, and its compiled step.
    model.fit(*batch(NETWORK), batch_size=len(batch(NETWORK)[0]), verbose=0)
    x, y = (torch.from_numpy(each) for each in batch(NETWORK))

    def block(num_steps: int) -> None:
        for _ in range(num_steps):
            model.train_function([(x, y)])

    return block


def maximum(value: int) -> int:
    found = torch.tensor([value])
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


blocks = {"eager": block_of(jit_compile=False)}
# torch.compile unrolls the 64 steps of an LSTM, for minutes, and fails at the padding of Keras' pooling (PyTorch 2.15).
if NETWORK in ("mlp", "transformer"):
    blocks["compiled"] = block_of(jit_compile=True)
measure({"Keras on PyTorch": blocks}, distributed.barrier, maximum)
distributed.destroy_process_group()
