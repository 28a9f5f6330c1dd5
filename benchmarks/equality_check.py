"""What the check of the first step costs: time from the start of a job to the end of its first step, with and without.

    launch/run python benchmarks/equality_check.py --rounds 5

Starts jobs of two ranks that train four networks by ``model.fit`` for one step, by turns with
``on_unequal="stop"`` and ``"ignore"``, and one process of Keras without hvdtrain. Prints, for each network, the median
seconds of all, and the median and the range of the ratios of the first to the second and to the third, which ran one
after the other; and the seconds that the check itself takes.
"""

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

BATCH_SIZE = 32
NETWORKS = ("dense", "convolutions", "recurrent", "transformer")


def train_on_this_rank(network: str, on_unequal: str, start_s: float) -> None:
    import hvdtrain

    topology = hvdtrain.init(seed=1, on_unequal=on_unequal)
    import keras

    from hvdtrain.training.equality.step_check import StepCheck

    model, x, y = compiled(network, hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), topology.rank)
    hvdtrain.broadcast(model)
    run, took_s = StepCheck.run, []

    def timed(check: StepCheck, batch: object) -> object:
        begin_s = time.perf_counter()
        finding = run(check, batch)
        took_s.append(time.perf_counter() - begin_s)
        assert finding.unequal is None and finding.unchecked is None, finding  # noqa: PT018
        return finding

    StepCheck.run = timed  # type: ignore[method-assign, assignment]
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
    if topology.rank == 0:
        print(f"RESULT {time.time() - start_s} {sum(took_s)}", flush=True)


def train_with_keras_alone(network: str, start_s: float) -> None:
    import keras

    model, x, y = compiled(network, keras.optimizers.Adam(), rank=0)
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
    print(f"RESULT {time.time() - start_s} 0", flush=True)


def compiled(network: str, optimizer: Any, rank: int) -> tuple[Any, Any, Any]:
    """A model, and the inputs and labels of one batch."""
    import keras
    import numpy as np
    from keras import layers

    rng = np.random.default_rng(rank)
    if network == "dense":
        inputs = layers.Input((784,))
        hidden = layers.Dropout(0.2)(layers.Dense(512, "relu")(layers.Dense(512, "relu")(inputs)))
    elif network == "convolutions":
        inputs = hidden = layers.Input((32, 32, 3))
        for width in (32, 32, 64, 64, 128, 128):
            hidden = layers.Conv2D(width, 3, padding="same", strides=1 + (width > 32))(hidden)
            hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
        hidden = layers.GlobalAveragePooling2D()(hidden)
    elif network == "recurrent":
        inputs = layers.Input((80,), dtype="int32")
        hidden = layers.Bidirectional(layers.LSTM(64))(layers.Embedding(5000, 64, mask_zero=True)(inputs))
    else:
        inputs = layers.Input((64,), dtype="int32")
        hidden = layers.Embedding(5000, 128)(inputs)
        for _ in range(4):
            hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(4, 32)(hidden, hidden))
            hidden = layers.LayerNormalization()(hidden + layers.Dense(128)(layers.Dense(512, "gelu")(hidden)))
        hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    shape = (BATCH_SIZE, *inputs.shape[1:])
    x = rng.integers(1, 5000, shape) if inputs.dtype == "int32" else rng.normal(size=shape).astype("float32")
    return model, x, rng.integers(0, 10, BATCH_SIZE)


def measure(network: str, on_unequal: str | None) -> tuple[float, float]:
    """Seconds to the end of the first step, and of the check; ``on_unequal=None``: of Keras alone."""
    launcher = [] if on_unequal is None else ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    more = [] if on_unequal is None else ["--on-unequal", on_unequal]
    command = [*launcher, sys.executable, __file__, "--network", network, *more, "--start", str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()
    return float(words[1]), float(words[2])


def with_range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--on-unequal", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.network:
        if options.on_unequal is None:
            train_with_keras_alone(options.network, options.start)
        else:
            train_on_this_rank(options.network, options.on_unequal, options.start)
        return
    print(
        "network       with, s  without, s  ratio                  Keras alone, s  ratio                  the check, s"
    )
    for network in NETWORKS:
        rounds = [[measure(network, way) for way in ("stop", "ignore", None)] for _ in range(options.rounds)]
        first_step_s, check_s = ([[way[i] for way in each] for each in rounds] for i in (0, 1))
        checked, plain, keras_alone = (statistics.median(values) for values in zip(*first_step_s, strict=True))
        over_plain = with_range([each[0] / each[1] for each in first_step_s])
        over_keras = with_range([each[0] / each[2] for each in first_step_s])
        print(
            f"{network:13} {checked:7.2f}  {plain:10.2f}  {over_plain:21}  {keras_alone:14.2f}  {over_keras:21}  "
            f"{statistics.median(each[0] for each in check_s):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
