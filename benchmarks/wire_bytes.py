"""What training sends over the network: bytes per step and rank, and how much of the link it makes use of.

    launch/run python benchmarks/wire_bytes.py        # as root, with Debian's iproute2 and openssh-server

Hosts are network namespaces of this machine, joined by links of 100 Mbit/s, a rank on each. Trains a network of 67 MB
in sync mode and in local mode, each for two numbers of steps: the difference is that of the steps alone, without the
start. Bytes are those that the hosts' interfaces have sent, with the headers of IP and TCP. A ring has to send
2 (N - 1) / N times the size of the model from each rank; goals: at most 1.06 of that, at least 0.92 of the link.
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
    local = hvdtrain.LocalTraining(every=EVERY) if mode == "local" else None
    options = {"steps": steps, "check_every": 0, "log_every": 1000, "local": local}
    summary = hvdtrain.Trainer(model, hvdtrain.data.Arrays(x, x), batch_size=4, **options).fit()
    if topology.rank == 0:
        size = sum(4 * variable.value.shape.num_elements() for variable in model.weights)
        print(json.dumps({"seconds": summary["wall_seconds"], "model_bytes": size}), flush=True)


def run(lab: Laboratory, mode: str, steps: int) -> tuple[list[int], float, int]:
    """The bytes that each host has sent, the seconds of the training, and the bytes of the model."""
    before = [lab.bytes_sent(name) for name in lab.names]
    command = [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), sys.executable, __file__, "--train", mode, str(steps)]
    done = subprocess.run(lab.command("lab1", command), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stdout}\n{done.stderr}")
    result = json.loads(next(line for line in done.stdout.splitlines() if '"seconds"' in line).partition(">:")[2])
    sent = [lab.bytes_sent(name) - first for name, first in zip(lab.names, before, strict=True)]
    return sent, result["seconds"], result["model_bytes"]


def measure(lab: Laboratory, mode: str, few: int, many: int) -> tuple[float, float]:
    """Bytes over those that a ring has to send, and the rate over that of the link."""
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
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet")
    parser.add_argument("--train", nargs=2, metavar=("MODE", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train[0], int(arguments.train[1]))
        return
    for ranks in arguments.ranks:
        with Laboratory(ranks, rate_mbit=RATE_MBIT, mtu_bytes=arguments.mtu) as lab:
            for mode in ("sync", "local"):
                found = [measure(lab, mode, 4, 12) for _ in range(arguments.repeats)]
                for i, name in enumerate(("bytes over the needed", "rate over the link's")):
                    values = [each[i] for each in found]
                    spread = f"{min(values):.3f} to {max(values):.3f}, {len(values)} repetitions"
                    print(f"{ranks} ranks, {mode}: {name}: {statistics.median(values):.3f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
