"""Steps of PyTorch's DistributedDataParallel with one of its own compression hooks, on this process's rank.

For benchmarks/compression.py, on a host of the lab; runs in a separate environment with torch and numpy. Holds one
batch in memory. Rank 0 prints the median of step times and the bytes that its host sent per step, without warm-up.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch_networks import Last, cnn

WARM_UP_STEPS = 10
SENT_BYTES = Path("/sys/class/net/eth0/statistics/tx_bytes")
ONE_BUCKET_MB = 1000
# PowerSGDState requires that the first 2 steps are sent whole.
POWER_SGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}


def model_and_batch(task: str, batch_size: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The networks of the tasks in benchmarks/compression.py: the text task's has 20,000 words and 3 labels."""
    if task == "cifar10":
        return cnn(), torch.randn(batch_size, 3, 24, 24), torch.randint(10, (batch_size,))
    words, labels = torch.randint(20_000, (batch_size, 30)), torch.randint(3, (batch_size,))
    return Last(vocabulary=20_000, classes=3), words, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["cifar10", "text"])
    parser.add_argument("hook", choices=["none", "fp16", "powersgd:4"])
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    network, x, y = model_and_batch(arguments.task, arguments.batch_size)
    # Over Gloo, this hook was seen to wait forever with several buckets; probably it occupies all of Gloo's threads.
    bucket_mb = ONE_BUCKET_MB if arguments.hook == "powersgd:4" else None
    model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=bucket_mb)
    if arguments.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif arguments.hook == "powersgd:4":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **POWER_SGD), powerSGD_hook.powerSGD_hook)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), nn.CrossEntropyLoss()
    seconds, sent_before = [], 0
    for step in range(WARM_UP_STEPS + arguments.steps):
        if step == WARM_UP_STEPS:
            sent_before = int(SENT_BYTES.read_text())
        began_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began_s)
    if distributed.get_rank() == 0:
        sent = (int(SENT_BYTES.read_text()) - sent_before) / arguments.steps
        step_ms = 1000 * statistics.median(seconds[WARM_UP_STEPS:])
        print("RESULT " + json.dumps({"step_ms": step_ms, "bytes_sent_per_step": sent}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
