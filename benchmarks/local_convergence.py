"""Final loss of local training compared with sync training after the same number of samples: digits and text.

    launch/run mpirun -np 4 python benchmarks/local_convergence.py

Trains with each configuration and several seeds, and prints mean and standard deviation of the averaged model's
final loss. The text is the source code of the installed Keras and NumPy, byte by byte; each sample is used at
most once. The last results are in ``benchmarks/results/local_convergence.json``.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
import numpy as np
from keras import layers

from hvdtrain import LocalSGDConfig
from hvdtrain.data import Arrays, Data
from hvdtrain.system import versions
from hvdtrain.tasks.loading import load_task

CONTEXT_BYTES = 24
# Name to a function from the number of steps to the configuration.
WAYS: dict[str, Callable[[int], LocalSGDConfig | None]] = {
    "sync": lambda steps: None,
    "H=4": lambda steps: LocalSGDConfig(sync_every=4),
    "H=16": lambda steps: LocalSGDConfig(sync_every=16),
    "H=64": lambda steps: LocalSGDConfig(sync_every=64),
    "H=16, slots averaged": lambda steps: LocalSGDConfig(sync_every=16, average_slots="average"),
    "H=64, slots averaged": lambda steps: LocalSGDConfig(sync_every=64, average_slots="average"),
    "H=4, nesterov": lambda steps: LocalSGDConfig(sync_every=4, outer="nesterov"),
    "H=16, nesterov": lambda steps: LocalSGDConfig(sync_every=16, outer="nesterov"),
    "H=64, nesterov": lambda steps: LocalSGDConfig(sync_every=64, outer="nesterov"),
    "H=16, overlap": lambda steps: LocalSGDConfig(sync_every=16, overlap=True),
    "H=16 after a quarter in sync": lambda steps: LocalSGDConfig(sync_every=16, sync_steps_first=steps // 4),
    "H=64, adacomm": lambda steps: LocalSGDConfig(sync_every=64, sync_schedule="adacomm"),
}


class Digits:
    steps = 345  # 15 epochs on 2 ranks

    def __init__(self) -> None:
        self.task = load_task("digits")
        self.data = self.task.read_data(None)
        self.training, self.evaluation = self.data.training, self.data.evaluation

    def model(self, rate: float) -> keras.Model:
        model = self.task.make_model(self.data)
        model.compile(optimizer=keras.optimizers.Adam(rate * 2e-3), loss=self.task.make_loss())
        return model


class Text:
    steps = 800

    def __init__(self) -> None:
        text = b"".join(_sources("keras") + _sources("numpy"))
        data = np.frombuffer(text, np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(data, CONTEXT_BYTES + 1)
        last = int(0.95 * len(windows))
        self.bytes = len(data)
        # Every third window only: overlapping samples hardly differ.
        self.training = _samples(windows[:last:3])
        self.evaluation = _samples(windows[last + CONTEXT_BYTES :: 97])

    def model(self, rate: float) -> keras.Model:
        model = keras.Sequential(
            [
                layers.Input((CONTEXT_BYTES,), dtype="int32"),
                layers.Embedding(256, 16),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(256),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(rate * 1e-3), loss=loss)
        return model


def _sources(package: str) -> list[bytes]:
    module = __import__(package)
    folder = Path(str(module.__file__)).parent
    return [path.read_bytes() for path in sorted(folder.rglob("*.py"))]


def _samples(windows: np.ndarray) -> Arrays:
    return Arrays(windows[:, :-1].astype(np.int32), windows[:, -1].astype(np.int32))


def final_loss(task: Digits | Text, local_sgd: LocalSGDConfig | None, seed: int, rate: float) -> float:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model = task.model(rate)
    config = hvdtrain.TrainConfig(
        mode="sync" if local_sgd is None else "local",
        local_sgd=local_sgd or LocalSGDConfig(),
        steps=task.steps,
        seed=seed,
        eval_every=task.steps,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=task.steps),
    )
    return hvdtrain.Trainer(model, Data(task.training, task.evaluation), config, reporter=None).fit()["eval"]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0], help="factors of the learning rate")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--tasks", nargs="*", default=["digits", "text"])
    arguments = parser.parse_args()
    makers: dict[str, Callable[[], Digits | Text]] = {"digits": Digits, "text": Text}
    results: dict[str, dict[str, list[float]]] = {}
    for name in arguments.tasks:
        task = makers[name]()
        results[name] = {}
        for way, rate in itertools.product(arguments.ways, arguments.rates):
            losses = [final_loss(task, WAYS[way](task.steps), seed, rate) for seed in range(arguments.seeds)]
            if len(arguments.rates) > 1:
                way = f"{way}, {rate:g}x the learning rate"
            results[name][way] = losses
            if topology.rank == 0:
                spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
                print(f"{name}: {way}: loss {statistics.mean(losses):.4f} ({spread:.4f})", flush=True)
    if topology.rank == 0:
        path = Path(__file__).parent / "results" / "local_convergence.json"
        path.parent.mkdir(exist_ok=True)
        facts = {"ranks": topology.size, "versions": versions.versions(), "losses": results}
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
