"""Steps on a GPU: hvdtrain on one rank compared with plain Keras and PyTorch, on the same networks, interleaved.

    launch/run python benchmarks/gpu_steps.py
    launch/run python benchmarks/gpu_steps.py --tasks synthetic-transformer --batch-sizes 64 --precisions bfloat16
    launch/run python benchmarks/gpu_steps.py --torch-python /path/to/an/environment/with/torch/bin/python

Keras' own compiled step, as ``model.fit`` runs it, and hvdtrain's have the same network, optimizer and samples in the
host's memory, from which each reads through an input pipeline of its own; each chooses by itself whether XLA compiles
the step. PyTorch holds one batch in GPU memory and runs without a compiler. Each peer is a process that compiles its
step and then waits for its turns; those of ``--at-once`` cases are prepared at the same time. Prints for each case the
median step time of Keras, and the ratio of the others to it in the same turn: median and quartiles. A ratio above 1
means that Keras is faster. Also runs without a GPU, with small batches. Saves results/gpu_steps.json.
"""

import argparse
import contextlib
import itertools
import json
import math
import queue
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
TASKS = ("synthetic-resnet50", "synthetic-transformer")
PRECISIONS = ("float32", "bfloat16", "float16")
_BLOCK_S = 1.0


class Peer:
    """A process that makes steps of one case."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def start_peers(case: tuple[str, int, str], commands: dict[str, list[str]]) -> dict[str, Peer]:
    return {name: Peer([*command, *map(str, case)]) for name, command in commands.items()}


def measure(peers: dict[str, Peer], turns: int) -> dict[str, list[float]]:
    """The step times in ms of each turn, by peer."""
    num_steps = {}
    for name, peer in peers.items():
        step_ms = peer.step_ms(2)
        num_steps[name] = 2 if math.isnan(step_ms) else math.ceil(1000 * _BLOCK_S / max(0.1, step_ms))
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
    parser.add_argument("--at-once", type=int, default=1, help="cases whose peers are in memory at the same time")
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
    for first in range(0, len(cases), arguments.at_once):
        began_s = time.monotonic()
        started = {case: start_peers(case, commands) for case in cases[first : first + arguments.at_once]}
        for case, peers in started.items():
            for name in list(peers):
                left_s = max(0.1, arguments.ready_seconds - (time.monotonic() - began_s))
                if not peers[name].wait_until_ready(left_s):
                    print(
                        f"{case}: {name} failed, or was not ready after {time.monotonic() - began_s:.0f} s", flush=True
                    )
                    peers.pop(name).end()
        print(f"ready after {time.monotonic() - began_s:.0f} s", flush=True)
        for (task, batch_size, precision), peers in started.items():
            name = f"{task}, batch {batch_size}, {precision}"
            if peers:
                facts = {peer: each.facts for peer, each in peers.items()}
                results[name] = {"peers": facts, "step_ms": measure(peers, arguments.turns)}
                print(summary(name, results[name]), flush=True)
                path.write_text(json.dumps(results, indent=1) + "\n")
            for peer in peers.values():
                peer.end()


if __name__ == "__main__":
    main()
