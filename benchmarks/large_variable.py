"""A model with one variable of 2.5 GiB on 2 ranks: two steps, a checkpoint, and a third step of new processes.

    launch/run python benchmarks/large_variable.py                      # over MPI, then over Gloo
    launch/run python benchmarks/large_variable.py --gib 9 --launchers mpi  # more than 2^31 elements

Compares the variable with the updates that NumPy makes in double precision, and its digests between ranks. Prints the
peak resident memory of each rank, above that of a process after its imports, in multiples of the variable.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memory import peak_bytes

OUTPUTS, RANKS, SAMPLES_PER_RANK, LEARNING_RATE = 16_384, 2, 2, 1000.0
BLOCK = 256  # columns that NumPy updates at a time
LAUNCHERS = {
    "mpi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)],
    "gloo": ["horovodrun", "--gloo", "-np", str(RANKS)],
}


def samples(inputs: int):  # type: ignore[no-untyped-def]
    """Inputs and targets of all ranks; an epoch is one step, so that their order does not matter."""
    import numpy as np

    random = np.random.default_rng(0)
    shape = (RANKS * SAMPLES_PER_RANK, inputs)
    x = random.normal(scale=inputs**-0.5, size=shape).astype(np.float32)
    return x, random.normal(size=(len(x), OUTPUTS)).astype(np.float32)


def largest_difference(kernel, steps: int) -> float:  # type: ignore[no-untyped-def]
    """The largest difference from what NumPy computes, relative to the largest update."""
    import numpy as np

    x, y = (each.astype(np.float64) for each in samples(len(kernel)))
    difference = update = 0.0
    for start in range(0, OUTPUTS, BLOCK):  # Columns do not depend on each other.
        columns = slice(start, start + BLOCK)
        initial = np.full((len(kernel), BLOCK), np.float32(0.01), np.float64)
        expected = initial.copy()
        for _ in range(steps):
            expected -= LEARNING_RATE * x.T @ (2 * (x @ expected - y[:, columns]) / y.size)
        difference = max(difference, float(np.abs(kernel[:, columns] - expected).max()))
        update = max(update, float(np.abs(expected - initial).max()))
    return difference / update


def train(steps: int, gib: float, folder: Path) -> None:
    """Runs on each rank; prints what was measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    from keras import layers

    from hvdtrain.distributed.replica_consistency import weights_sha256
    from hvdtrain.distributed.snapshot import host_array

    inputs = round(gib * 2**30 / 4 / OUTPUTS)
    x, y = samples(inputs)
    before, start_s = peak_bytes(), time.perf_counter()
    # Rank 0's value is broadcast.
    initial = keras.initializers.Constant(0.01 * (1 + topology.rank))
    dense = layers.Dense(OUTPUTS, use_bias=False, kernel_initializer=initial)
    model = keras.Sequential([layers.Input((inputs,)), dense])
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse", jit_compile=False)
    config = hvdtrain.TrainConfig(
        steps=steps,
        batch_size=SAMPLES_PER_RANK,
        checkpoint=hvdtrain.CheckpointConfig(checkpoint_every=2, resume="auto"),
    )
    checkpointer = hvdtrain.Checkpointer(folder, model, keep=1)
    data = hvdtrain.data.Arrays(x, y)
    hvdtrain.Trainer(model, data, config, checkpointer=checkpointer, reporter=None).fit()
    seconds, peak = time.perf_counter() - start_s, peak_bytes()
    found = {
        "rank": topology.rank,
        "bytes": int(host_array(dense.kernel).nbytes),
        "peak": peak - before,
        "seconds": seconds,
        "sha256": weights_sha256(model),
        "difference": largest_difference(host_array(dense.kernel), steps) if topology.rank == 0 else None,
    }
    print("FOUND " + json.dumps(found), flush=True)


def run(launcher: str, steps: int, gib: float, folder: Path) -> list[dict]:
    command = [sys.executable, __file__, "--run", str(steps), str(folder), "--gib", str(gib)]
    done = subprocess.run([*LAUNCHERS[launcher], *command], capture_output=True, text=True, check=False)
    found = [json.loads(line.split("FOUND ")[1]) for line in done.stdout.splitlines() if "FOUND " in line]
    if done.returncode or len(found) != RANKS:
        sys.exit(f"{steps} steps over {launcher} failed:\n{done.stdout}\n{done.stderr}")
    return sorted(found, key=lambda each: each["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.5)
    parser.add_argument("--launchers", nargs="*", default=list(LAUNCHERS), choices=LAUNCHERS)
    parser.add_argument("--run", nargs=2, metavar=("STEPS", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        train(int(arguments.run[0]), arguments.gib, Path(arguments.run[1]))
        return
    for launcher in arguments.launchers:
        with tempfile.TemporaryDirectory() as folder:
            for steps, what in ((2, "two steps and a checkpoint"), (3, "resumed, one step more and a checkpoint")):
                found = run(launcher, steps, arguments.gib, Path(folder) / "checkpoints")
                if len({each["sha256"] for each in found}) > 1 or not found[0]["difference"] < 1e-4:
                    sys.exit(f"{what}: wrong values: {found}")
                peaks = " and ".join(f"{each['peak'] / each['bytes']:.2f}" for each in found)
                print(
                    f"{launcher}, {found[0]['bytes'] / 2**30:.2f} GiB, {what}: {found[0]['seconds']:.0f} s, peaks of "
                    f"ranks 0 and 1 {peaks} times the variable, difference from NumPy {found[0]['difference']:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
