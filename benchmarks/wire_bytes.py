"""Network traffic of training: bytes per step and rank, and link utilization.

    launch/run python benchmarks/wire_bytes.py        # as root, with Debian's iproute2 and openssh-server

Hosts are network namespaces of this machine with one rank each and links of 100 Mbit/s. Trains a network of 67 MB in
sync and local mode, each with two numbers of steps, so that the difference excludes start-up. Bytes are counted at the
hosts' interfaces, including IP and TCP headers. Each rank of a ring must send 2 (N - 1) / N times the model size.
Goals: at most 1.06 of that, at least 0.92 of the link.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
from laboratory import Laboratory

RATE_MBIT = 100.0
WIDTH, LAYERS = 2368, 3
EVERY = 4


def train(mode: str, steps: int) -> None:
    """Runs on each rank; rank 0 prints the seconds and the size of the model as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    from keras import layers

    model = keras.Sequential([layers.Input((WIDTH,)), *(layers.Dense(WIDTH) for _ in range(LAYERS))])
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse", jit_compile=False)
    x = np.zeros((64, WIDTH), np.float32)
    config = hvdtrain.TrainConfig(
        mode=mode,
        local_sgd=hvdtrain.LocalSGDConfig(sync_every=EVERY if mode == "local" else 16),
        batch_size=4,
        steps=steps,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=1000),
    )
    summary = hvdtrain.Trainer(model, hvdtrain.data.Arrays(x, x), config, reporter=None).fit()
    if topology.rank == 0:
        size = sum(4 * variable.value.shape.num_elements() for variable in model.weights)
        print(json.dumps({"seconds": summary["wall_seconds"], "model_bytes": size}), flush=True)


def run(lab: Laboratory, mode: str, steps: int) -> tuple[list[int], float, int]:
    """Trains; returns the bytes sent by each host, the training time in seconds and the model size in bytes."""
    before = [lab.bytes_sent(name) for name in lab.names]
    command = [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), sys.executable, __file__, "--train", mode, str(steps)]
    done = subprocess.run(lab.command("lab1", command), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stdout}\n{done.stderr}")
    result = json.loads(next(line for line in done.stdout.splitlines() if '"seconds"' in line).partition(">:")[2])
    sent = [lab.bytes_sent(name) - first for name, first in zip(lab.names, before, strict=True)]
    return sent, result["seconds"], result["model_bytes"]


def measure(lab: Laboratory, mode: str, few: int, many: int) -> tuple[float, float]:
    """Bytes relative to the minimum of a ring, and rate relative to the link's."""
    (few_sent, few_s, size), (many_sent, many_s, _) = run(lab, mode, few), run(lab, mode, many)
    steps = many - few
    sent = statistics.mean(b - a for a, b in zip(few_sent, many_sent, strict=True))
    ranks = len(lab.names)
    needed = 2 * (ranks - 1) / ranks * size * steps / (EVERY if mode == "local" else 1)
    return sent / needed, 8 * sent / (many_s - few_s) / (1e6 * RATE_MBIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mtu", type=int, default=9000, help="MTU in bytes")
    parser.add_argument("--train", nargs=2, metavar=("MODE", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train[0], int(arguments.train[1]))
        return
    for ranks in arguments.ranks:
        with Laboratory(ranks, rate_mbit=RATE_MBIT, mtu_bytes=arguments.mtu) as lab:
            for mode in ("sync", "local"):
                found = [measure(lab, mode, 4, 12) for _ in range(arguments.repeats)]
                for i, name in enumerate(("bytes relative to a ring's minimum", "rate relative to the link's")):
                    values = [each[i] for each in found]
                    spread = f"{min(values):.3f} to {max(values):.3f}, {len(values)} repetitions"
                    print(f"{ranks} ranks, {mode}: {name}: {statistics.median(values):.3f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
