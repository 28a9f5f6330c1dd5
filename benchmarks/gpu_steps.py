"""Steps on a GPU: hvdtrain on one rank compared with plain Keras and PyTorch, on the same networks, interleaved.

    launch/run python benchmarks/gpu_steps.py
    launch/run python benchmarks/gpu_steps.py --tasks synthetic-transformer --batch-sizes 64 --precisions bfloat16
    launch/run python benchmarks/gpu_steps.py --torch-python /path/to/an/environment/with/torch/bin/python

Keras' own compiled step, as ``model.fit`` runs it, and hvdtrain's have the same network, optimizer and samples in the
host's memory, from which each reads through an input pipeline of its own; each chooses by itself whether XLA compiles
the step. PyTorch holds one batch in GPU memory and runs without a compiler. Each peer is a process that compiles its
step and then waits for its turns. The first one compiles alone; XLA's choices of algorithms are then kept for the
others, because they vary from one compilation to the next by more than peers do. Prints for each case the median step
time of Keras, and the ratio of the others to it in the same turn: median and quartiles. A ratio above 1 means that
Keras is faster. Also runs without a GPU, with small batches. Saves results/gpu_steps.json.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TASKS = ("synthetic-resnet50", "synthetic-transformer")
PRECISIONS = ("float32", "bfloat16", "float16")


class Peer:
    """A process that makes steps of one case."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.facts: dict[str, Any] | None = None
        """None until the peer is ready."""

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, kind: str, timeout_s: float | None = None) -> str | None:
        """What follows a word that begins a line; None if the process has ended or takes longer."""
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=timeout_s):
                if line.startswith(kind):
                    return line.removeprefix(kind)
        return None

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Waits for it to compile."""
        answer = self._answer("READY ", timeout_s)
        self.facts = None if answer is None else json.loads(answer)
        return answer is not None

    def step_ms(self, num_steps: int) -> float:
        """Makes steps; the milliseconds of one, NaN if the process has failed."""
        try:
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        except OSError:
            return math.nan
        answer = self._answer("TOOK ")
        return math.nan if answer is None else 1000 * float(answer) / num_steps

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def start_peers(commands: dict[str, list[str]], ready_s: float, cache: str) -> dict[str, Peer]:
    """The peers that are ready in time, the first of which has compiled before the others."""
    flags = [f"--xla_gpu_{name}_cache_dir={cache}" for name in ("per_fusion_autotune", "experimental_autotuner")]
    env = {**os.environ, "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}
    names = list(commands)
    ready: dict[str, Peer] = {}
    for group in (names[:1], names[1:]):
        peers = {name: Peer(commands[name], env) for name in group}
        end_s = time.monotonic() + ready_s
        for name, peer in peers.items():
            if peer.wait_until_ready(max(0.1, end_s - time.monotonic())):
                ready[name] = peer
            else:
                print(f"{name} failed, or was not ready after {ready_s:.0f} s", flush=True)
                peer.end()
    return ready


def measure(peers: dict[str, Peer], turns: int, block_s: float) -> dict[str, list[float]]:
    """The step times in ms of each turn, by peer."""
    num_steps = {}
    for name, peer in peers.items():
        step_ms = peer.step_ms(2)
        num_steps[name] = 2 if math.isnan(step_ms) else math.ceil(1000 * block_s / max(0.1, step_ms))
    times: dict[str, list[float]] = {name: [] for name in peers}
    order = list(peers)
    for turn in range(turns):
        first = turn % len(order)
        for name in [*order[first:], *order[:first]]:
            times[name].append(peers[name].step_ms(num_steps[name]))
    return times


def summary(name: str, found: dict[str, Any]) -> str:
    times = found["step_ms"]
    parts = [f"Keras {np.median(times['Keras']):.2f} ms"] if "Keras" in times else []
    for peer, values in times.items():
        if not parts or peer != "Keras":
            low, ratio, high = np.percentile(np.divide(values, times.get("Keras", 1)), [25, 50, 75])
            parts.append(f"{peer} {ratio:.3f} ({low:.3f} to {high:.3f}, {np.median(values):.2f} ms)")
    xla = ", ".join(
        f"{peer} {'with' if facts['XLA'] else 'without'} XLA"
        for peer, facts in found["peers"].items()
        if "XLA" in facts
    )
    return f"{name}: {'; '.join(parts)}; {xla}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--peers", nargs="*", default=["Keras", "hvdtrain"], help="also Keras-no-xla, hvdtrain-no-xla")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--block-seconds", type=float, default=1, help="a peer's turn")
    parser.add_argument("--ready-seconds", type=float, default=600, help="how long peers may take to compile")
    parser.add_argument("--torch-python", help="Python of an environment with torch and numpy")
    parser.add_argument(
        "--peer", nargs="*", default=[], metavar="NAME=COMMAND", help="another one, as peers/served_steps.py"
    )
    arguments = parser.parse_args()
    commands = {name: [sys.executable, str(HERE / "peers" / "keras_gpu_steps.py"), name] for name in arguments.peers}
    commands |= {name: shlex.split(command) for name, _, command in (each.partition("=") for each in arguments.peer)}
    if arguments.torch_python:
        commands["PyTorch"] = [arguments.torch_python, str(HERE / "peers" / "torch_gpu_steps.py")]
    path = HERE / "results" / "gpu_steps.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    cases = list(itertools.product(arguments.tasks, arguments.batch_sizes, arguments.precisions))
    for task, batch_size, precision in cases:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            case = [task, str(batch_size), precision]
            lines = {name: [*command, *case] for name, command in commands.items()}
            peers = start_peers(lines, arguments.ready_seconds, cache)
            print(f"compiled in {time.monotonic() - began_s:.0f} s", flush=True)
            name = f"{task}, batch {batch_size}, {precision}"
            if peers:
                facts = {peer: each.facts for peer, each in peers.items()}
                times = measure(peers, arguments.turns, arguments.block_seconds)
                results[name] = {"peers": facts, "step_ms": times}
                print(summary(name, results[name]), flush=True)
                path.write_text(json.dumps(results, indent=1) + "\n")
            for peer in peers.values():
                peer.end()


if __name__ == "__main__":
    main()
