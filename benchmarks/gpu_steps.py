"""Steps on a GPU: hvdtrain on one rank compared with plain Keras and PyTorch, on the same networks, interleaved.

    launch/run python benchmarks/gpu_steps.py
    launch/run python benchmarks/gpu_steps.py --tasks synthetic-transformer --batch-sizes 64 --precisions bfloat16
    launch/run python benchmarks/gpu_steps.py --torch-python /path/to/an/environment/with/torch/bin/python

Keras' own compiled step, as ``model.fit`` runs it, and hvdtrain's have the same network, optimizer and samples in
memory, from which each reads through an input pipeline of its own; each chooses by itself whether XLA compiles the
step. PyTorch holds one batch in GPU memory and runs without a compiler. Prints for each task, batch size and precision
the median step time of Keras, and the ratio of the others to it in the same turn: median and quartiles. Ratios above 1
mean that Keras is faster. Also runs without a GPU, with small batches. Saves results/gpu_steps.json.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TASKS = ("synthetic-resnet50", "synthetic-transformer")
PRECISIONS = ("float32", "bfloat16", "float16")
_BLOCK_S = 1.0

Steps = Callable[[int], None]
"""Makes a number of steps and returns when the device has completed them."""


class TorchSteps:
    """PyTorch's steps, in a process of its own that waits between blocks."""

    def __init__(self, python: str, task: str, batch_size: int, precision: str):
        command = [python, str(HERE / "peers" / "torch_gpu_steps.py"), task, str(batch_size), precision]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, num_steps: int) -> None:
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            sys.exit("PyTorch's process failed")


def measure(task_name: str, batch_size: int, precision: str, turns: int, torch_python: str | None) -> dict[str, Any]:
    """The step times in ms of each turn, by peer."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import tensorflow as tf

    from hvdtrain.distributed import runtime
    from hvdtrain.fault_tolerance.job_watch import JobWatch
    from hvdtrain.tasks.loading import load_task
    from hvdtrain.training.clock import Clock
    from hvdtrain.training.step_runner import StepRunner

    if precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{precision}")
    task = load_task(task_name)
    data = task.read_data(None)
    collectives = runtime.current().collectives

    def compiled(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        model = task.make_model(data)
        task.compile(model, optimizer)
        return model

    def made_optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.01, momentum=0.9) if task.optimizer == "momentum" else keras.optimizers.Adam(1e-4)

    def wait_for(model: keras.Model) -> None:
        model.trainable_variables[-1].numpy()

    def keras_steps() -> tuple[Steps, bool]:
        model = compiled(made_optimizer())
        jit_compile = bool(model.jit_compile)
        model.make_train_function()
        samples = tf.data.Dataset.from_tensor_slices((data.training.x, data.training.y)).repeat()
        batches = iter(samples.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE))

        def steps(num_steps: int) -> None:
            for _ in range(num_steps):
                model.train_function(batches)
            wait_for(model)

        return steps, jit_compile

    def hvdtrain_steps() -> tuple[Steps, bool]:
        model = compiled(hvdtrain.DistributedOptimizer(made_optimizer()))
        config = hvdtrain.TrainConfig(batch_size=batch_size, steps=1)
        watch = JobWatch(collectives)
        runner = StepRunner(model, data.training, config, collectives=collectives, job_watch=watch)
        runner.start()

        def steps(num_steps: int) -> None:
            runner.run_steps(num_steps, Clock())
            wait_for(model)

        return steps, bool(runner.config.jit_compile)

    plain, plain_jit = keras_steps()
    own, own_jit = hvdtrain_steps()
    peers: dict[str, Steps] = {"Keras": plain, "hvdtrain": own}
    if torch_python is not None:
        peers["PyTorch"] = TorchSteps(torch_python, task_name, batch_size, precision)
    num_steps = {}
    for name, steps in peers.items():
        for _ in range(3):  # compiles, and tries algorithms out
            steps(2)
        num_steps[name] = math.ceil(_BLOCK_S / max(1e-4, seconds(steps, 2)))
    times: dict[str, list[float]] = {name: [] for name in peers}
    order = list(peers)
    for turn in range(turns):
        first = turn % len(order)
        for name in [*order[first:], *order[:first]]:
            times[name].append(1000 * seconds(peers[name], num_steps[name]))
    return {"device": topology.device, "XLA": {"Keras": plain_jit, "hvdtrain": own_jit}, "step_ms": times}


def seconds(steps: Steps, num_steps: int) -> float:
    """The time of one step."""
    began_s = time.perf_counter()
    steps(num_steps)
    return (time.perf_counter() - began_s) / num_steps


def summary(name: str, found: dict[str, Any]) -> str:
    times = found["step_ms"]
    parts = [f"Keras {np.median(times['Keras']):.2f} ms"]
    for peer, values in times.items():
        if peer != "Keras":
            low, ratio, high = np.percentile(np.divide(values, times["Keras"]), [25, 50, 75])
            parts.append(f"{peer} {ratio:.3f} ({low:.3f} to {high:.3f})")
    jit = ", ".join(f"{peer} {'with' if on else 'without'} XLA" for peer, on in found["XLA"].items())
    return f"{name}, {found['device']}: {'; '.join(parts)}; {jit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--torch-python", help="Python of an environment with torch and numpy")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [(t, b, p) for t in arguments.tasks for b in arguments.batch_sizes for p in arguments.precisions]
    if arguments.run:
        print("MEASURED " + json.dumps(measure(*cases[0], arguments.turns, arguments.torch_python)))
        return
    path = HERE / "results" / "gpu_steps.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for task, batch_size, precision in cases:
        # A process for each, so that GPU memory is free again.
        command = [sys.executable, __file__, "--run", "--tasks", task, "--batch-sizes", str(batch_size)]
        command += ["--precisions", precision, "--turns", str(arguments.turns)]
        command += ["--torch-python", arguments.torch_python] if arguments.torch_python else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{task}, batch {batch_size}, {precision} failed:\n{done.stdout}")
        name = f"{task}, batch {batch_size}, {precision}"
        results[name] = json.loads(done.stdout.partition("MEASURED ")[2])
        print(summary(name, results[name]), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
