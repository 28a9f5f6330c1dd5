"""Time to the same loss with stragglers: how much earlier the remedies get there than sync training.

    launch/run mpirun -np 4 python benchmarks/time_to_loss.py

Ailments: the last of the ranks takes twice as long for each sample (remedy ``--balance``); or a rank's steps take a
second longer, 8 % of them, as with four micro-batches of which 2 % are held up (remedy ``--quorum`` of half the ranks).
A layer sleeps instead of computing. For each seed, sync training and the remedy take turns, with as many steps, on
digits and text. The target is the test loss that both reach: the larger of their lowest ones, with the weights at every
tenth of rank 0's micro-batches. Prints the ratio of the times to it, and the final accuracies: mean and standard
deviation over seeds. The last results are in ``benchmarks/results/time_to_loss.json``.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
import numpy as np
from delays import Delay, WeightsOverTime
from keras import layers
from learning_tasks import CONTEXT_BYTES, Text

from hvdtrain import BalanceConfig, QuorumConfig
from hvdtrain.data import Arrays, Data, evaluation_dataset
from hvdtrain.tasks.loading import load_task

BATCH_SIZE = 32
# To the remedy, and the share of a rank's steps that are held up.
AILMENTS: dict[str, tuple[dict[str, Any], float]] = {
    "one rank at half speed": ({"balancing": BalanceConfig(balance=True, balance_every=5)}, 0.0),
    "hold-ups": ({"stragglers": QuorumConfig(quorum=max(1, topology.size // 2))}, 0.08),
}


def samples_of(source: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = next(iter(evaluation_dataset(source, source.num_samples, rank=0, size=1)))
    return np.asarray(x), np.asarray(y)


def digits_data() -> Data:
    data = load_task("digits").read_data(None)
    x, y = samples_of(data.training)
    # One long epoch: ranks wait for each other at its end.
    return Data(Arrays(np.tile(x, (40, 1, 1, 1)), np.tile(y, 40)), data.evaluation)


def text_data() -> Data:
    text = Text()
    return Data(text.training, text.evaluation)


def digits_layers() -> list[keras.layers.Layer]:
    return [layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(32, activation="tanh"), layers.Dense(10)]


def text_layers() -> list[keras.layers.Layer]:
    return [
        layers.Input((CONTEXT_BYTES,), dtype="int32"),
        layers.Embedding(256, 16),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(256),
    ]


TASKS: dict[str, Any] = {"digits": (digits_data, digits_layers, 5e-3), "text": (text_data, text_layers, 3e-3)}


def train(task: str, data: Data, seed: int, options: dict[str, Any], hold_ups: float) -> dict[str, Any]:
    """A run's test losses over time, and its final accuracy."""
    _, make_layers, learning_rate = TASKS[task]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    is_slow = not hold_ups and topology.rank == topology.size - 1
    delay = Delay((2 if is_slow else 1) * arguments.step_s / BATCH_SIZE, hold_ups, 1.0)
    first, *others = make_layers()
    model = keras.Sequential([first, delay, *others])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=[accuracy])
    weights = WeightsOverTime(model)
    # A quorum makes more micro-batches than steps: some are too late.
    delay.at_step = dict.fromkeys(range(10, 10 * arguments.steps, 10), weights.keep)
    config = hvdtrain.TrainConfig(
        **options,
        batch_size=BATCH_SIZE,
        steps=arguments.steps,
        seed=seed,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=arguments.steps),
    )
    summary = hvdtrain.Trainer(model, data, config, reporter=None).fit()
    points = weights.losses(*samples_of(data.evaluation))
    return {
        "curve": [[moment - delay.step_ends_s[0], loss] for moment, loss in points],
        "accuracy": summary["eval"]["accuracy"],
    }


def seconds_to(curve: list[list[float]], target: float) -> float:
    return next(seconds for seconds, loss in curve if loss <= target)


def main() -> None:
    results: dict[str, Any] = {}
    for task, (read_data, _, _) in TASKS.items():
        data = read_data()
        for ailment in arguments.ailments:
            remedy, hold_ups = AILMENTS[ailment]
            ratios: list[float] = []
            accuracies: dict[str, list[float]] = {"sync": [], "remedy": []}
            for seed in range(arguments.seeds):
                runs = {
                    name: train(task, data, seed, options, hold_ups)
                    for name, options in (("sync", {}), ("remedy", remedy))
                }
                target = max(min(loss for _, loss in each["curve"]) for each in runs.values())
                ratios.append(seconds_to(runs["sync"]["curve"], target) / seconds_to(runs["remedy"]["curve"], target))
                for name, each in runs.items():
                    accuracies[name].append(each["accuracy"])
            results[f"{task}, {ailment}"] = {"ratios": ratios, "accuracies": accuracies}
            if topology.rank == 0:
                finals = ", ".join(
                    f"{name} {statistics.mean(each):.4f} ({statistics.stdev(each) if len(each) > 1 else 0:.4f})"
                    for name, each in accuracies.items()
                )
                print(
                    f"{task}, {ailment}: sync takes {statistics.median(ratios):.2f} times as long "
                    f"({min(ratios):.2f} to {max(ratios):.2f}); final accuracy {finals}",
                    flush=True,
                )
    if topology.rank == 0:
        path = Path(__file__).parent / "results" / "time_to_loss.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **results}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ailments", nargs="+", choices=AILMENTS, default=list(AILMENTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a step")
    arguments = parser.parse_args()
    main()
