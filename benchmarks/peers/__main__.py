"""hvdtrain's step against those of its peers: the same networks and batches, in turn.

    launch/run python benchmarks/peers
    launch/run python benchmarks/peers --torch-python /path/to/an/environment/with/torch/bin/python

Prints each peer's time of a step over hvdtrain's in the same round: median, and range over the rounds. A number above 1
says that hvdtrain is faster. Raw Horovod runs in hvdtrain's job, block after block; each other peer in a job of its
own, and two jobs of the same steps differ by a tenth and more. All draw their batch from an iterator over one, but for
PyTorch, which has it at hand. Of the cases of one peer (one or ten steps in a compiled call; an allreduce for each
gradient or one for all) that with the shortest median counts. Keeps the last result for each number of ranks in
results/peers.json, and draws results/peers.png.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

Process = tuple[list[str], dict[str, str]]
"""A command line, and what it has in its environment besides what this process has."""

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from samples import BATCH_SIZES

RESULTS = HERE.parent / "results"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def by_itself(python: str, script: str, ranks: int) -> list[Process]:
    """A process for each rank, with what TensorFlow's and PyTorch's own strategies want to be told."""
    processes = []
    ports = free_ports(ranks)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    for rank in range(ranks):
        task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env = {**place, "TF_CONFIG": task, "WORKERS": str(ranks)}
        processes.append(([python, str(HERE / script)], env))
    return processes


def run(processes: list[Process], networks: list[str]) -> dict[str, dict[str, float]]:
    """What the first process prints: milliseconds by peer and case."""
    common = {**os.environ, "PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "3", "NETWORKS": " ".join(networks)}
    jobs = [
        subprocess.Popen(command, env={**common, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, env in processes
    ]
    outputs = [job.communicate(timeout=900)[0] for job in jobs]
    found = [line.partition("RESULT ")[2] for line in outputs[0].splitlines() if "RESULT " in line]
    if any(job.returncode for job in jobs) or not found:
        sys.exit(f"{processes[0][0]} failed:\n" + "\n".join(outputs)[-4000:])
    # Another rank may have said its own in the same line.
    return json.JSONDecoder().raw_decode(found[0])[0]


def jobs_for(ranks: int, torch_python: str | None) -> list[list[Process]]:
    jobs = [[([*MPIRUN, "-np", str(ranks), sys.executable, str(HERE / "horovod_steps.py")], {})]]
    jobs.append(by_itself(sys.executable, "multi_worker.py", ranks))
    if torch_python is not None:
        jobs.append(by_itself(torch_python, "torch_ddp.py", ranks))
    if ranks == 1:
        jobs.append(by_itself(sys.executable, "keras_alone.py", 1))
    return jobs


def steps_of_fastest(rounds: list[dict[str, float]], network: str) -> list[float]:
    """The step of each round, in the case of the network that is fastest by its median."""
    cases = [case for case in rounds[0] if case.startswith(f"{network},")]
    return min(([each[case] for each in rounds] for case in cases), key=statistics.median)


def draw(ratios: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    networks = sorted({network for peers in ratios.values() for network in peers})
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(ratios)
    for i, (peer, found) in enumerate(ratios.items()):
        medians = [statistics.median(found[network]) for network in networks if network in found]
        axes.bar([j + i * width for j in range(len(medians))], medians, width, label=peer)
    axes.axhline(1, color="gray", linestyle="--")
    axes.set_yscale("log")
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(networks))], networks)
    axes.set_ylabel("time of a step over hvdtrain's")
    figure.legend(ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(BATCH_SIZES), choices=BATCH_SIZES)
    parser.add_argument("--torch-python", help="the interpreter of an environment with torch and numpy")
    arguments = parser.parse_args()
    kept = RESULTS / "peers.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    results: dict[str, dict[str, dict[str, list[float]]]] = before.get("step_ms", {})
    ratios: dict[str, dict[str, list[float]]] = before.get("over_hvdtrain", {})
    for ranks in arguments.ranks:
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.rounds):
            for processes in jobs_for(ranks, arguments.torch_python):
                for peer, step_ms in run(processes, arguments.networks).items():
                    rounds.setdefault(peer, []).append(step_ms)
        for peer, found in rounds.items():
            steps = {case: [each[case] for each in found] for case in found[0]}
            results.setdefault(f"{ranks} rank(s)", {}).setdefault(peer, {}).update(steps)
        for network in arguments.networks:
            own = steps_of_fastest(rounds["hvdtrain"], network)
            print(f"{ranks} rank(s), {network}: hvdtrain {statistics.median(own):.3f} ms", flush=True)
            for peer in [peer for peer in rounds if peer != "hvdtrain"]:
                theirs = steps_of_fastest(rounds[peer], network)
                values = [other / mine for other, mine in zip(theirs, own, strict=True)]
                ratios.setdefault(f"{peer}, {ranks} rank(s)", {})[network] = values
                told = f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
                print(f"{ranks} rank(s), {network}: {peer} takes {told} times as long", flush=True)
    RESULTS.mkdir(exist_ok=True)
    kept.write_text(json.dumps({"step_ms": results, "over_hvdtrain": ratios}, indent=1) + "\n")
    draw(ratios, RESULTS / "peers.png")


if __name__ == "__main__":
    main()
