"""Final loss and peak of bytes of local SGD in fragments, compared with the whole model at once: digits, transformer.

    launch/run mpirun -np 2 python benchmarks/fragments.py

Trains on the same samples with each configuration and several seeds. Prints mean and standard deviation of the averaged
model's final loss, whether the mean is within two standard deviations of the unfragmented mode it is compared with, and
the bytes of the largest average, relative to that mode's. The transformer predicts the next byte of source code, as in
``local_convergence.py``. The last results are in ``benchmarks/results/fragments.json``.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
from learning_tasks import TASKS, Digits, Text
from local_convergence import topology

import hvdtrain
from hvdtrain import LocalSGDConfig
from hvdtrain.data import Data
from hvdtrain.system import versions

_DELAY: dict[str, Any] = {"overlap": True, "fragment_delay": 4}
_NESTEROV: dict[str, Any] = {"outer": "nesterov"}
# Name to the options of local SGD, with H=16, and the way it is compared with.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "F=1": ({}, "F=1"),
    "F=2": ({"fragments": 2}, "F=1"),
    "F=4": ({"fragments": 4}, "F=1"),
    "F=4, delay 4": ({"fragments": 4, **_DELAY}, "F=1"),
    "F=4, delay 4, alpha 0.5": ({"fragments": 4, **_DELAY, "merge_alpha": 0.5}, "F=1"),
    "F=4, delay 4, int4": ({"fragments": 4, **_DELAY, "sync_dtype": "int4"}, "F=1"),
    "F=1, nesterov": (_NESTEROV, "F=1, nesterov"),
    "F=4, nesterov": ({"fragments": 4, **_NESTEROV}, "F=1, nesterov"),
    "F=4, delay 4, nesterov, int4": ({"fragments": 4, **_DELAY, **_NESTEROV, "sync_dtype": "int4"}, "F=1, nesterov"),
    "F=4, delay 4, nesterov, int4, alpha 0.5": (
        {"fragments": 4, **_DELAY, **_NESTEROV, "sync_dtype": "int4", "merge_alpha": 0.5},
        "F=1, nesterov",
    ),
}


def train(task: Digits | Text, options: dict[str, Any], seed: int) -> tuple[float, int]:
    """The averaged model's final loss, and the bytes of the largest average."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    config = hvdtrain.TrainConfig(
        mode="local",
        local_sgd=LocalSGDConfig(sync_every=16, **options),
        steps=task.steps,
        seed=seed,
        eval_every=task.steps,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=task.steps),
    )
    trainer = hvdtrain.Trainer(task.model(1.0), Data(task.training, task.evaluation), config, reporter=None)
    summary = trainer.fit()
    return summary["eval"]["loss"], summary["average_bytes_max"]


def line(losses: Sequence[float], largest: int, reference: Sequence[float], whole: int) -> str:
    sigma = statistics.stdev(reference)
    difference = statistics.mean(losses) - statistics.mean(reference)
    verdict = "within" if abs(difference) <= 2 * sigma else "NOT within"
    return (
        f"loss {statistics.mean(losses):.4f} ({statistics.stdev(losses):.4f}), {difference:+.4f}: {verdict} 2 sigma "
        f"({2 * sigma:.4f}); largest average {largest:,} bytes, {largest / whole:.2f} of the whole"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--tasks", nargs="*", default=["digits", "transformer"])
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results" / "fragments.json"
    # Those of other tasks are kept.
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for name in arguments.tasks:
        task = TASKS[name]()
        found = results[name] = {}
        for way in arguments.ways:
            options, reference = WAYS[way]
            runs = [train(task, options, seed) for seed in range(arguments.seeds)]
            found[way] = {"losses": [loss for loss, _ in runs], "largest_average_bytes": runs[0][1]}
            if topology.rank == 0:
                compared = found[reference]
                text = line(
                    found[way]["losses"],
                    found[way]["largest_average_bytes"],
                    compared["losses"],
                    compared["largest_average_bytes"],
                )
                print(f"{name}: {way}: {text}", flush=True)
    if topology.rank == 0:
        path.parent.mkdir(exist_ok=True)
        facts = {"ranks": topology.size, "versions": versions.versions(), "tasks": results}
        path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
