"""Final loss of local training compared with sync training after the same number of samples: digits, text, transformer.

    launch/run mpirun -np 2 python benchmarks/local_convergence.py

Trains with each configuration and several seeds. Prints mean and two standard deviations of the averaged model's final
loss, and its difference from sync mode: the mean of the differences of equal seeds, and its 95 % confidence interval
(Student's t). The text is the source code of the installed Keras and NumPy, byte by byte; each sample is used at most
once. Results are kept in ``benchmarks/results/local_convergence.json``; ``--table`` prints them again.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
from learning_tasks import TASKS, Digits, Text
from paired_losses import cell

from hvdtrain import LocalSGDConfig
from hvdtrain.data import Data
from hvdtrain.system import versions


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train."""

    config: Callable[[int], LocalSGDConfig | None]
    """From the number of steps; None: sync mode."""
    has_slow_rank: bool = False
    """Rank 1 takes twice as long for a step."""


def _every(sync_every: int, **options: Any) -> Way:
    return Way(lambda steps: LocalSGDConfig(sync_every=sync_every, **options))


_WAIT_FREE = Way(lambda steps: LocalSGDConfig(sync_every=16, wait_free=True))
WAYS: dict[str, Way] = {
    "sync": Way(lambda steps: None),
    "H=4": _every(4),
    "H=16": _every(16),
    "H=64": _every(64),
    "H=4, F=4": _every(4, fragments=4),
    "H=16, F=4": _every(16, fragments=4),
    "H=64, F=4": _every(64, fragments=4),
    "H=4, F=2": _every(4, fragments=2),
    "H=16, F=2": _every(16, fragments=2),
    "H=64, F=2": _every(64, fragments=2),
    "H=16, int8": _every(16, sync_dtype="int8"),
    "H=16, int4": _every(16, sync_dtype="int4"),
    "H=16, F=4, delay 4, int4": _every(16, fragments=4, overlap=True, fragment_delay=4, sync_dtype="int4"),
    "H=16, F=2, delay 4, int4": _every(16, fragments=2, overlap=True, fragment_delay=4, sync_dtype="int4"),
    "H=16, overlap": _every(16, overlap=True),
    "H=16, wait-free": _WAIT_FREE,
    "H=16, wait-free, a slow rank": dataclasses.replace(_WAIT_FREE, has_slow_rank=True),
    "H=4, nesterov": _every(4, outer="nesterov"),
    "H=16, nesterov": _every(16, outer="nesterov"),
    "H=64, nesterov": _every(64, outer="nesterov"),
    "H=16, slots averaged": _every(16, average_slots="average"),
    "H=64, slots averaged": _every(64, average_slots="average"),
    "H=16 after a quarter in sync": Way(lambda steps: LocalSGDConfig(sync_every=16, sync_steps_first=steps // 4)),
    "H=64, adacomm": _every(64, sync_schedule="adacomm"),
}


class SlowRank(keras.callbacks.Callback):
    """Makes steps of rank 1 twice as long."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if topology.rank == 1:
            time.sleep(time.perf_counter() - self._began_s)


def final_loss(task: Digits | Text, way: Way, seed: int, rate: float) -> float:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model = task.model(rate)
    local_sgd = way.config(task.steps)
    config = hvdtrain.TrainConfig(
        mode="sync" if local_sgd is None else "local",
        local_sgd=local_sgd or LocalSGDConfig(),
        steps=task.steps,
        seed=seed,
        eval_every=task.steps,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=task.steps),
    )
    callbacks = [SlowRank()] if way.has_slow_rank else []
    data = Data(task.training, task.evaluation)
    return hvdtrain.Trainer(model, data, config, callbacks=callbacks, reporter=None).fit()["eval"]["loss"]


def print_table(losses: dict[str, dict[str, list[float]]]) -> None:
    print("| | " + " | ".join(losses) + " |")
    print("|---" * (len(losses) + 1) + "|")
    for way in WAYS:
        cells = [cell(found[way], found["sync"]) if way in found else "" for found in losses.values()]
        print(f"| {way} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="from 2 to 10")
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0], help="factors of the learning rate")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--table", action="store_true", help="only print the results that are there")
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results" / "local_convergence.json"
    # Those of other ways and tasks are kept.
    results: dict[str, dict[str, list[float]]] = json.loads(path.read_text())["losses"] if path.exists() else {}
    if arguments.table:
        print_table(results)
        return
    for name in arguments.tasks:
        task = TASKS[name]()
        for rate, way in itertools.product(arguments.rates, arguments.ways):
            losses = [final_loss(task, WAYS[way], seed, rate) for seed in range(arguments.seeds)]
            found = results.setdefault(name if rate == 1 else f"{name}, {rate:g}x the learning rate", {})
            found[way] = losses
            if topology.rank == 0:
                print(f"{name}: {way}, {rate:g}x: {cell(losses, found.get('sync', losses))}", flush=True)
                facts = {"ranks": topology.size, "versions": versions.versions(), "losses": results}
                path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
