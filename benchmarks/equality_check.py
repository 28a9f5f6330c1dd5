"""What the check of the first step costs: time from the start of a job to the end of its first step, with and without.

    launch/run python benchmarks/equality_check.py --rounds 5

Starts jobs of two ranks that train four networks by ``model.fit`` for one step, by turns with
``on_unequal="stop"`` and ``"ignore"``. Prints, for each network, the median seconds of both, and the median and the
range of their ratios, each of two jobs that ran one after the other; and the seconds that the check itself takes.
"""

import argparse
import statistics
import subprocess
import sys
import time

NETWORKS = ("dense", "convolutions", "recurrent", "transformer")


def train(network: str, on_unequal: str, start_s: float) -> None:
    import hvdtrain

    topology = hvdtrain.init(seed=1, on_unequal=on_unequal)
    import keras
    import numpy as np
    from keras import layers

    from hvdtrain.training.equality.step_check import StepCheck

    rng = np.random.default_rng(topology.rank)
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
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), loss, metrics=["accuracy"])
    hvdtrain.broadcast(model)
    shape = (32, *inputs.shape[1:])
    x = rng.integers(1, 5000, shape) if inputs.dtype == "int32" else rng.normal(size=shape).astype("float32")
    run, took_s = StepCheck.run, []

    def timed(check: StepCheck, batch: object) -> object:
        begin_s = time.perf_counter()
        finding = run(check, batch)
        took_s.append(time.perf_counter() - begin_s)
        assert finding.unequal is None and finding.unchecked is None, finding  # noqa: PT018
        return finding

    StepCheck.run = timed  # type: ignore[method-assign, assignment]
    model.fit(x, rng.integers(0, 10, 32), batch_size=32, verbose=0)
    if topology.rank == 0:
        print(f"RESULT {time.time() - start_s} {sum(took_s)}", flush=True)


def measure(network: str, on_unequal: str) -> tuple[float, float]:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, __file__]
    more = ["--network", network, "--on-unequal", on_unequal, "--start", str(time.time())]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
    words = next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()
    return float(words[1]), float(words[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--on-unequal", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.network:
        train(options.network, options.on_unequal, options.start)
        return
    print("network       with, s  without, s  ratio (range)          the check, s")
    for network in NETWORKS:
        pairs = [(measure(network, "stop"), measure(network, "ignore")) for _ in range(options.rounds)]
        ratios = sorted(checked[0] / plain[0] for checked, plain in pairs)
        medians = [statistics.median(each[i][0] for each in pairs) for i in (0, 1)]
        check_s = statistics.median(checked[1] for checked, _ in pairs)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{network:13} {medians[0]:7.2f}  {medians[1]:10.2f}  {spread:21}  {check_s:.2f}", flush=True)


if __name__ == "__main__":
    main()
