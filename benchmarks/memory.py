"""Peak memory of a rank, compared with plain Keras: a network of 200 MB, trained with SGD and with Adam.

    launch/run python benchmarks/memory.py

Each case is a separate job on two ranks. Prints the peak resident memory of the largest rank, minus that of a process
after its imports, in multiples of the model size. Plain Keras holds the model, with Adam two slots per variable, and
the gradients that are not yet applied. The first step is compared with that of one process only with --on-unequal stop.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, LAYERS, STEPS = 4096, 3, 8
CASES = ("plain Keras", "sync", "sync, checkpoints", "local", "local, overlap", "local, nesterov")
OPTIMIZERS = ("sgd", "adam")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train(case: str, optimizer: str, on_unequal: str, folder: Path) -> None:
    """Runs on each rank; prints the size of the model and the peaks as JSON."""
    if case != "plain Keras":
        import hvdtrain
        from hvdtrain.training.config import GuardConfig

        hvdtrain.init(seed=0)
    import keras
    import numpy as np
    from keras import layers

    x, y = np.zeros((32 * STEPS, WIDTH), np.float32), np.zeros(32 * STEPS, np.int32)
    keras.Sequential([layers.Input((8,)), layers.Dense(8)]).predict(np.zeros((4, 8), np.float32), verbose=0)
    before = peak_bytes()
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([layers.Input((WIDTH,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 1e-4}}),
        loss=loss,
        jit_compile=False,
    )
    if case == "plain Keras":
        model.fit(x, y, batch_size=32, verbose=0)
    else:
        local_sgd = {
            "local": hvdtrain.LocalSGDConfig(sync_every=3),
            "local, overlap": hvdtrain.LocalSGDConfig(sync_every=3, overlap=True),
            "local, nesterov": hvdtrain.LocalSGDConfig(sync_every=3, outer="nesterov"),
        }
        config = hvdtrain.TrainConfig(
            mode="local" if case in local_sgd else "sync",
            local_sgd=local_sgd.get(case, hvdtrain.LocalSGDConfig()),
            steps=STEPS,
            guards=GuardConfig(on_unequal=on_unequal),
            checkpoint=hvdtrain.CheckpointConfig(checkpoint_every=3),
        )
        checkpointer = hvdtrain.Checkpointer(folder, model) if case == "sync, checkpoints" else None
        hvdtrain.Trainer(model, hvdtrain.data.Arrays(x, y), config, checkpointer=checkpointer, reporter=None).fit()
    size = sum(4 * variable.value.shape.num_elements() for variable in model.weights)
    print("PEAK " + json.dumps({"model": size, "before": before, "peak": peak_bytes()}), flush=True)


def multiples(case: str, optimizer: str, on_unequal: str) -> float:
    """The peak of the largest rank over the size of the model."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--case", case, optimizer, on_unequal, folder]
        line = command if case == "plain Keras" else [*MPIRUN, *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    found = [json.loads(line.split("PEAK ")[1]) for line in done.stdout.splitlines() if "PEAK " in line]
    if done.returncode or not found:
        sys.exit(f"{case} with {optimizer} failed:\n{done.stdout}\n{done.stderr}")
    return max((each["peak"] - each["before"]) / each["model"] for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=4, metavar=("CASE", "OPTIMIZER", "CHECK", "DIR"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--on-unequal", default="ignore", choices=["ignore", "stop"], help="stop: checks the step")
    arguments = parser.parse_args()
    if arguments.case:
        case, optimizer, on_unequal, folder = arguments.case
        train(case, optimizer, on_unequal, Path(folder))
        return
    for optimizer in arguments.optimizers:
        found: dict[str, list[float]] = {case: [] for case in arguments.cases}
        for _ in range(arguments.repeats):
            for case in arguments.cases:
                found[case].append(multiples(case, optimizer, arguments.on_unequal))
        for case, values in found.items():
            spread = f"{min(values):.2f} to {max(values):.2f}, {len(values)} repetitions"
            print(f"{optimizer}, {case}: {statistics.median(values):.2f}x the model size ({spread})", flush=True)


if __name__ == "__main__":
    main()
