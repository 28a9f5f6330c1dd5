"""Peak memory and time of a checkpoint in local mode, where each rank has a model and an optimizer of its own.

    launch/run python benchmarks/checkpoint_memory.py                          # 400 MB per rank, 2 and 4 ranks
    launch/run python benchmarks/checkpoint_memory.py --megabytes 1200 --ranks 2

Trains a network with Adam for a few steps, saves a checkpoint in the middle of a round, trains on, and restores it in
new processes. Prints for each the time, and the peak resident memory of rank 0 and of the largest other rank above that
before, in multiples of one rank's state (its model and optimizer).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS = 3
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"]


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Measured:
    """Measures the time of a block, and its peak of resident memory above that before."""

    def __enter__(self) -> "Measured":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before, self._start_s = status_bytes("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start_s
        self.bytes = status_bytes("VmHWM") - self._before


def run(action: str, megabytes: float, folder: Path) -> None:
    """Runs on each rank; prints what was measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    from keras import layers

    width = round((megabytes * 1e6 / 12 / LAYERS) ** 0.5)  # a weight and two slots, 4 bytes each
    model = keras.Sequential([layers.Input((width,)), *(layers.Dense(width) for _ in range(LAYERS))])
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    hvdtrain.broadcast(model)
    averager = hvdtrain.ParameterAverager(model, hvdtrain.LocalSGDConfig(sync_every=100))
    checkpointer = hvdtrain.Checkpointer(folder, model)
    x = np.random.default_rng(topology.rank).normal(size=(8, width)).astype(np.float32)

    def step() -> None:
        model.train_on_batch(x, x)
        averager.step(samples=len(x))

    state = sum(each.value.shape.num_elements() * 4 for each in [*model.weights, *model.optimizer.variables])
    for _ in range(3):  # The optimizer's memory is in use only once it is written.
        step()
    if action == "save":
        with Measured() as blocked:
            checkpointer.save(1, state=averager.state(), rank_state=averager.rank_state(), averaged=averager.averaged)
        with Measured() as writing:
            for _ in range(5):  # which changes what the background writes
                step()
            checkpointer.wait()
        peak = max(blocked.bytes, writing.bytes)
        report = {"state": state, "bytes": peak, "seconds": blocked.seconds, "background": writing.seconds}
    else:
        with Measured() as restoring:
            restored = checkpointer.restore()
            averager.restore(restored.state, restored.rank_state)
            del restored
        report = {"state": state, "bytes": restoring.bytes, "seconds": restoring.seconds}
    print("MEASURED " + json.dumps({"rank": topology.rank, **report}), flush=True)


def measure(action: str, ranks: int, megabytes: float, folder: Path) -> list[dict]:
    command = [sys.executable, __file__, "--run", action, str(folder), "--megabytes", str(megabytes)]
    done = subprocess.run([*MPIRUN, str(ranks), *command], capture_output=True, text=True, check=False)
    found = [json.loads(line.split("MEASURED ")[1]) for line in done.stdout.splitlines() if "MEASURED " in line]
    if done.returncode or len(found) != ranks:
        sys.exit(f"{action} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}")
    return sorted(found, key=lambda each: each["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400, help="state of one rank")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--run", nargs=2, metavar=("ACTION", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run[0], arguments.megabytes, Path(arguments.run[1]))
        return
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            for action in ("save", "restore"):
                first, *others = measure(action, ranks, arguments.megabytes, Path(folder) / "checkpoints")
                largest = max(each["bytes"] / each["state"] for each in others)
                seconds = f"{first['seconds']:.1f} s"
                if "background" in first:
                    seconds += f", then {first['background']:.1f} s in the background"
                print(
                    f"{action}, {ranks} ranks, {first['state'] / 1e6:.0f} MB each: rank 0 "
                    f"{first['bytes'] / first['state']:.2f}x, others {largest:.2f}x; {seconds}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
