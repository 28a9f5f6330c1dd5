"""PyTorch's DistributedDataParallel over Gloo on CPUs; runs in a separate environment with torch and numpy."""

import os

import torch
import torch.distributed as distributed
from blocks import NETWORK, measure
from samples import VOCABULARY, batch
from torch import nn

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // SIZE))
distributed.init_process_group("gloo")


class Same(nn.Module):
    """Max pooling like Keras' padding="same" for even sizes."""

    def forward(self, x):
        return nn.functional.max_pool2d(nn.functional.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, 2)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 64), nn.LSTM(64, 64, batch_first=True)
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        return self.dense(self.lstm(self.embedding(x))[0][:, -1])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(VOCABULARY, 128), nn.Linear(128, 10)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.dense(self.encoder(self.embedding(x)).mean(1))


def cnn():
    first = (nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), Same(), nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), Same())
    dense = (nn.Linear(64 * 36, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10))
    return nn.Sequential(*first, nn.Flatten(), *dense)


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


NETWORKS = {"cnn": cnn, "mlp": mlp, "lstm": Last, "transformer": Mean}


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
