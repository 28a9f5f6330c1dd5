"""PyTorch's DistributedDataParallel over Gloo on CPUs; runs in a separate environment with torch and numpy."""

import os

import torch
import torch.distributed as distributed
from blocks import NETWORK, measure
from samples import batch
from torch import nn
from torch_networks import NETWORKS

torch.set_num_threads(int(os.environ["THREADS"]))
distributed.init_process_group("gloo")


def block_of():
    model = nn.parallel.DistributedDataParallel(NETWORKS[NETWORK]())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = (torch.from_numpy(each) for each in batch(NETWORK))
    x, y, loss = x.movedim(-1, 1).contiguous() if NETWORK == "cnn" else x, y.long(), nn.CrossEntropyLoss()

    def block(num_steps):
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            loss(model(x), y).backward()
            optimizer.step()

    return block


def maximum(value):
    found = torch.tensor([value])
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


measure({"PyTorch DDP": {"1 a call": block_of()}}, distributed.barrier, maximum)
distributed.destroy_process_group()
