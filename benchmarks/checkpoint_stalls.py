"""How long training waits for a checkpoint, and how fast one is read, for states of several sizes.

    launch/run python benchmarks/checkpoint_stalls.py                    # states of 0.3, 1 and 3 GB, on 2 ranks
    launch/run python benchmarks/checkpoint_stalls.py --gigabytes 3 --ranks 1 --threads 1   # a core is free for writing

For each size, a job trains a network with Adam, whose weights and two slots are the state, and saves a checkpoint every
``--every`` steps, in the background. A step without one is the median of those in the second half between two
checkpoints. Prints how much longer the step is that makes the checkpoint (the stall), and how much longer all steps
until the next are together, relative to a step: medians over checkpoints, lowest and highest. Then all ranks restore
the last checkpoint, by turns with a plain reading of its files; the system has none of them in memory.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS = 3
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"]
BLOCK_BYTES = 16 << 20
REPEATS = 3


def uncached(folder: Path) -> list[Path]:
    """The files of a folder, of which the system keeps nothing in memory."""
    files = [each for each in folder.rglob("*") if each.is_file()]
    for each in files:
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return files


def reading_s(folder: Path) -> float:
    files, began_s = uncached(folder), time.perf_counter()
    for each in files:
        with each.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass
    return time.perf_counter() - began_s


def run(gigabytes: float, steps: int, every: int, threads: int | None, folder: Path) -> None:
    """Runs on each rank; rank 0 prints what it measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0, threads=threads)
    import keras
    import numpy as np
    from keras import layers

    from hvdtrain.distributed import runtime

    class Times(keras.callbacks.Callback):
        """When each step ended."""

        def __init__(self) -> None:
            super().__init__()
            self.ended_s: list[float] = []

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.ended_s.append(time.perf_counter())

    width = round((gigabytes * 1e9 / 3 / 4 / LAYERS) ** 0.5)
    hidden = [layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([layers.Input((width,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-5), loss, jit_compile=False)
    rng = np.random.default_rng(0)
    data = hvdtrain.data.Arrays(rng.normal(size=(256, width)).astype(np.float32), rng.integers(0, 10, 256))
    checkpointer, times = hvdtrain.Checkpointer(folder, model, keep=1), Times()
    config = hvdtrain.TrainConfig(
        steps=steps,
        batch_size=32,
        guards=hvdtrain.GuardConfig(check_every=0, on_unequal="ignore"),
        checkpoint=hvdtrain.CheckpointConfig(checkpoint_every=every),
        logging=hvdtrain.LoggingConfig(log_every=steps),
    )
    hvdtrain.Trainer(model, data, config, callbacks=[times], checkpointer=checkpointer, reporter=None).fit()
    ranks = runtime.current().collectives
    reads_s, restores_s = [], []
    for _ in range(REPEATS):
        if ranks.rank == 0:
            reads_s.append(reading_s(folder))
            uncached(folder)
        ranks.barrier()
        began_s = time.perf_counter()
        checkpointer.load()
        ranks.barrier()
        restores_s.append(time.perf_counter() - began_s)
    if topology.rank == 0:
        num_bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        found = {"bytes": num_bytes, "ended_s": times.ended_s, "reads_s": reads_s, "restores_s": restores_s}
        print("MEASURED " + json.dumps(found), flush=True)


def of_checkpoints(ended_s: list[float], every: int) -> tuple[float, list[float], list[float]]:
    """The length of a step without a checkpoint; of each checkpoint, the stall and all that steps are longer."""
    lengths = [later - earlier for earlier, later in itertools.pairwise(ended_s)]
    # Step number i + 1 takes lengths[i - 1]; a checkpoint is made at the end of steps every, 2 * every, …
    intervals = [lengths[start : start + every] for start in range(every - 1, len(lengths) - every + 1, every)]
    step_s = statistics.median(each for interval in intervals for each in interval[every // 2 :])
    return step_s, [each[0] - step_s for each in intervals], [sum(each) - every * step_s for each in intervals]


def with_spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.3, 1, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, help="compute threads of a rank; default: an equal share of the cores")
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--job", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = arguments.every * (arguments.checkpoints + 1)
    if arguments.job:
        run(arguments.gigabytes[0], steps, arguments.every, arguments.threads, Path(arguments.job))
        return
    for gigabytes in arguments.gigabytes:
        line = [*MPIRUN, str(arguments.ranks), sys.executable, __file__, "--gigabytes", str(gigabytes)]
        line += ["--every", str(arguments.every), "--checkpoints", str(arguments.checkpoints)]
        line += ["--threads", str(arguments.threads)] if arguments.threads else []
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*line, "--job", folder], capture_output=True, text=True, check=False)
        found = [json.loads(line.split("MEASURED ")[1]) for line in done.stdout.splitlines() if "MEASURED " in line]
        if done.returncode or not found:
            sys.exit(f"the job with {gigabytes} GB failed:\n{done.stdout}\n{done.stderr}")
        (measured,) = found
        step_s, stalls_s, costs_s = of_checkpoints(measured["ended_s"], arguments.every)
        size = measured["bytes"] / 1e9
        print(f"{size:.2f} GB, {arguments.ranks} rank(s), a step takes {step_s:.3f} s, {len(stalls_s)} checkpoints:")
        print(f"  stall: {with_spread([each / step_s for each in stalls_s])} of a step")
        print(f"  all longer steps: {with_spread([each / step_s for each in costs_s])} of a step")
        ratios = [mine / plain for mine, plain in zip(measured["restores_s"], measured["reads_s"], strict=True)]
        speeds = with_spread([size / each for each in measured["reads_s"]])
        print(f"  restoring: {with_spread(ratios)} of the time of reading the files, {speeds} GB/s", flush=True)


if __name__ == "__main__":
    main()
