"""A sharded table of 3 GiB on 2 ranks: four steps and a checkpoint, then a fifth step of new jobs on 1, 2 and 4 ranks.

    launch/run python benchmarks/large_table.py                        # needs 16 GB of memory
    launch/run python benchmarks/large_table.py --gib 1 --resumed 2 4

Compares the loss of the fifth step, of the same samples, and rows that no sample uses, over the resumed jobs. Prints
the time of each job, and the peak resident memory of each rank, above that of a process after its imports, in multiples
of the rank's rows.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import peak_bytes
from rank_jobs import measured_on_ranks, tell

WIDTH, IDS_PER_SAMPLE, GLOBAL_BATCH, STEPS = 64, 8, 1024, 4


def train(steps: int, rows: int, folder: Path) -> None:
    """Runs on each rank; prints what was measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    from keras import layers

    rng = np.random.default_rng(0)
    # Samples have even ids only.
    x = 2 * rng.integers(0, rows // 2, ((STEPS + 1) * GLOBAL_BATCH, IDS_PER_SAMPLE))
    y = rng.normal(size=(len(x), 1)).astype(np.float32)
    before, start_s = peak_bytes(), time.perf_counter()
    ids = keras.Input((IDS_PER_SAMPLE,), dtype="int32")
    table = hvdtrain.layers.ShardedEmbedding(rows, WIDTH)
    model = keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(table(ids))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    checkpoint = hvdtrain.CheckpointConfig(checkpoint_every=STEPS, resume="auto")
    config = hvdtrain.TrainConfig(steps=steps, batch_size=GLOBAL_BATCH // topology.size, checkpoint=checkpoint)
    trainer = hvdtrain.Trainer(
        model, (x, y), config, checkpointer=hvdtrain.Checkpointer(folder, model, keep=1), reporter=None
    )
    summary = trainer.fit()
    seconds, peak = time.perf_counter() - start_s, peak_bytes()
    unused = table(2 * rng.integers(0, rows // 2, 1000) + 1).numpy()
    found = {
        "rank": topology.rank,
        "bytes": 4 * WIDTH * -(-rows // topology.size),
        "peak": peak - before,
        "seconds": seconds,
        "loss": summary["loss"],
        "unused": hashlib.sha256(unused.tobytes()).hexdigest()[:12],
    }
    tell(found)


def run(ranks: int, steps: int, rows: int, folder: Path) -> dict[str, Any]:
    found = measured_on_ranks(ranks, __file__, "--run", str(steps), str(folder), "--rows", str(rows))
    peaks = ", ".join(f"{each['peak'] / each['bytes']:.2f}" for each in found)
    first: dict[str, Any] = found[0]
    gib = first["bytes"] / 2**30
    print(
        f"{ranks} ranks, {gib:.2f} GiB of rows on each, up to step {steps}: {first['seconds']:.0f} s, peaks {peaks} "
        f"times the rows; loss {first['loss']:.7g}, unused rows {first['unused']}",
        flush=True,
    )
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--resumed", type=int, nargs="*", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=2, metavar=("STEPS", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        train(int(arguments.run[0]), arguments.rows, Path(arguments.run[1]))
        return
    rows = round(arguments.gib * 2**30 / 4 / WIDTH)
    with tempfile.TemporaryDirectory() as name:
        saved, resumed = Path(name) / "saved", Path(name) / "resumed"
        unused = run(2, STEPS, rows, saved)["unused"]
        losses = []
        for ranks in arguments.resumed:
            shutil.copytree(saved, resumed)
            found = run(ranks, STEPS + 1, rows, resumed)
            losses.append(found["loss"])
            shutil.rmtree(resumed)
            if found["unused"] != unused:
                sys.exit("rows that no sample uses have changed")
        if losses and max(losses) - min(losses) > 1e-5 * max(losses):
            sys.exit(f"the losses of the resumed jobs differ: {losses}")


if __name__ == "__main__":
    main()
