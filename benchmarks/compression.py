"""Compressed gradients on slow networks: steps per second, bytes, time to a loss, accuracy.

    launch/run python benchmarks/compression.py speed      # as root, with Debian's iproute2 and openssh-server
    launch/run python benchmarks/compression.py speed --hosts 4 --torch-python TORCH_ENVIRONMENT/bin/python
    launch/run python benchmarks/compression.py accuracy --tasks digits text cifar10 --steps 600

``speed``: hosts are network namespaces of this machine with one rank each, over links with a given rate and 0.5 ms of
delay. Trains the CIFAR-10 network and a text classifier (20,000 words, its embedding reduced as a dense tensor), on
generated samples, with each compression in turn. Prints steps per second and bytes, and the time to the lowest loss of
the uncompressed run, relative to that run: that of the steps, at their median, without compilation and evaluations.
With ``--torch-python``, also PyTorch's DistributedDataParallel over Gloo on the same hosts, with networks of the same
shapes, plain and with its hooks ``fp16_compress_hook`` and ``powerSGD_hook`` of rank 4: steps per second relative to
plain DistributedDataParallel, and to hvdtrain with the same compression. It holds one batch in memory; hvdtrain reads
and distorts its samples. Printed are medians over ``--repeats`` and, in parentheses, the lowest and the highest value.
``accuracy``: final accuracy on real digits, on real texts and on generated images, with several seeds.
The last results are in ``benchmarks/results/compression.json``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
import text_files
from laboratory import Laboratory

COMPRESSIONS = {
    "none": [],
    "fp16": ["--compression", "fp16"],
    "powersgd:4": ["--compression", "powersgd:4"],
}
TORCH = "PyTorch, "
"""Before the names of the compressions, in results."""
TORCH_PORT = 29_500
OPTIONS = {
    "cifar10": ["--learning-rate", "0.05", "--checkpoint-every", "100000", "--histograms-every", "0"],
    "text": ["--sparse-as-dense"],
}
LAB_TASKS = {"cifar10": "cifar10", "text": str(HERE / "compression_tasks.py:TEXT")}
"""Those with which speed is measured."""
DELAY_MS = 0.5
LONGER = {"none": 1.0, "fp16": 1.1, "powersgd:4": 2.0}
"""How many times the steps of an uncompressed run: others may need more steps to its loss."""
TORCH_STEPS = 60
NUM_EVALUATIONS = 20
"""Of the uncompressed run."""


def train(command: list[str], run_dir: Path) -> dict[str, Any]:
    """Trains; returns the evaluations (step, loss) and facts of the summary."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    summary = json.loads((run_dir / "summary.json").read_text())
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [[event["step"], event["loss"]] for event in events if event["event"] == "eval"],
        "step_ms": summary["step_ms"]["p50"],
        "bytes_reduced_per_step": summary["bytes_reduced"] / summary["steps"],
        "accuracy": summary["eval"].get("accuracy"),
    }


def command_of(task: str, compression: str, steps: int, run_dir: Path, *more: str) -> list[str]:
    length = ["--steps", str(steps), "--log-every", "1000", "--check-every", "0"]
    # One thread: the hosts of the lab share this machine's cores.
    options = [*length, *COMPRESSIONS[compression], *more, "--threads", "1", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "hvdtrain", "--task", task, *options]


def train_with_torch(
    lab: Laboratory, python: str, task: str, compression: str, batch_size: int, steps: int
) -> dict[str, float]:
    """Trains with PyTorch, one process per host; returns what the first of them prints."""
    script = [python, str(HERE / "peers" / "torch_hooks.py"), task, compression]
    script += ["--batch-size", str(batch_size), "--steps", str(steps)]
    place = [f"MASTER_ADDR={lab.address(lab.names[0])}", f"MASTER_PORT={TORCH_PORT}", "GLOO_SOCKET_IFNAME=eth0"]
    place += [f"WORLD_SIZE={len(lab.names)}", f"PYTHONPATH={HERE}"]
    processes = [
        subprocess.Popen(
            lab.command(host, ["env", *place, f"RANK={rank}", *script]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(lab.names)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode != 0 for process in processes):
        sys.exit("\n".join([f"failed: {' '.join(script)}", *outputs]))
    return json.loads(outputs[0].partition("RESULT ")[2].splitlines()[0])


def speed(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rate in options.rates_mbit:
        for task in options.tasks:
            key = f"{task}, {options.hosts} ranks, batch {options.batch_size}, {rate} Mbit/s"
            with Laboratory(options.hosts, rate_mbit=rate, delay_ms=DELAY_MS) as lab:
                results[key] = runs_of(lab, task, options)
            report(key, results[key])
    return results


def make_sample_data(task: str, folder: Path) -> None:
    make = [sys.executable, "-m", "hvdtrain", "--task", task, "--make-sample-data", str(folder)]
    subprocess.run(make, check=True, capture_output=True)


def runs_of(lab: Laboratory, task: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Each compression in turn, ``--repeats`` times."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in COMPRESSIONS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make_sample_data(LAB_TASKS[task], data)
        for repeat in range(options.repeats):
            for name in COMPRESSIONS:
                run_dir = Path(folder) / f"{name}-{repeat}"
                more = [*OPTIONS[task], "--data-dir", str(data), "--seed", str(repeat)]
                more += ["--batch-size", str(options.batch_size)]
                more += ["--eval-every", str(max(1, options.steps // NUM_EVALUATIONS))]
                num_steps = round(LONGER[name] * options.steps)
                line = command_of(LAB_TASKS[task], name, num_steps, run_dir, *more)
                sent = lab.bytes_sent(lab.names[0])
                launch = [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), *line]
                found = train(lab.command(lab.names[0], launch), run_dir)
                found["bytes_sent_per_step"] = (lab.bytes_sent(lab.names[0]) - sent) / num_steps
                runs[name].append(found)
                if options.torch_python is not None:
                    others = runs.setdefault(TORCH + name, [])
                    where = (lab, options.torch_python, task, name)
                    others.append(train_with_torch(*where, options.batch_size, TORCH_STEPS))
    return runs


def ratios(numerators: list[dict[str, Any]], denominators: list[dict[str, Any]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(numerators, denominators, strict=True)]


def times_to_loss(plain: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[float]:
    """How many times as fast each run has reached the lowest loss of a plain one; without those that have not."""
    ratios = []
    for one, other in zip(plain, found, strict=True):
        steps, goal = min(one["losses"], key=lambda each: each[1])
        reached = [step for step, loss in other["losses"] if loss <= goal]
        if reached:
            ratios.append(steps * one["step_ms"] / (reached[0] * other["step_ms"]))
    return ratios


def formatted(values: list[float], digits: int = 2) -> str:
    low, median, high = (f"{each:.{digits}f}" for each in (min(values), statistics.median(values), max(values)))
    return f"{median} ({low} to {high})"


def report(key: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    for name, found in runs.items():
        is_torch = name.startswith(TORCH)
        plain, same = runs[TORCH + "none" if is_torch else "none"], runs[name.removeprefix(TORCH)]
        step_ms = formatted([run["step_ms"] for run in found], 1)
        faster = formatted(ratios(plain, found, "step_ms"))
        on_wire = f"1/{statistics.median(ratios(plain, found, 'bytes_sent_per_step')):.1f}"
        print(f"{key}, {name}: {step_ms} ms per step, {faster} times as many steps/s as without, ", end="")
        if is_torch:
            over = formatted(ratios(found, same, "step_ms"))
            print(f"{on_wire} of the bytes on the wire; takes {over} times as long as hvdtrain", flush=True)
            continue
        fewer = statistics.median(ratios(plain, found, "bytes_reduced_per_step"))
        times = times_to_loss(runs["none"], found)
        to_loss = f"{formatted(times)} times as fast to the loss" if times else "never at the loss"
        print(
            f"1/{fewer:.1f} of the bytes ({on_wire} on the wire), {to_loss} in {len(times)} of {len(found)} runs",
            flush=True,
        )


def accuracy(tasks: list[str], seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            data = Path(folder) / task
            options = [] if task == "digits" else ["--data-dir", str(data), *OPTIONS[task]]
            if task == "text":
                data.mkdir()
                text_files.write_tables(data)
            elif task == "cifar10":
                make_sample_data(task, data)
            found[task] = {name: [] for name in COMPRESSIONS}
            for seed in range(seeds):
                for name, values in found[task].items():
                    run_dir = Path(folder) / f"{task}-{name}-{seed}"
                    line = command_of(task, name, steps, run_dir, "--seed", str(seed), *options)
                    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *line]
                    values.append(train(launch, run_dir)["accuracy"])
            for name, values in found[task].items():
                mean, sigma = np.mean(values), np.std(values, ddof=1)
                print(f"{task}, {name}: accuracy {mean:.4f}, sigma {sigma:.4f}, {seeds} seeds", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("--rates-mbit", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--tasks", nargs="*", choices=["digits", *LAB_TASKS], default=list(LAB_TASKS))
    parser.add_argument("--hosts", type=int, default=2, help="hosts, with one rank each")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of each rank in a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--torch-python", help="the interpreter of an environment with torch and numpy")
    arguments = parser.parse_args()
    if arguments.what == "speed" and "digits" in arguments.tasks:
        parser.error("speed is measured with cifar10 and text, whose gradients are large. Received: digits")
    path = HERE / "results" / "compression.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if arguments.what == "accuracy":
        measured = accuracy(arguments.tasks, arguments.seeds, arguments.steps)
        found: dict[str, Any] = {"accuracy": {**kept.get("accuracy", {}), **measured}}
    else:
        found = speed(arguments)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {**kept, **found}.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
