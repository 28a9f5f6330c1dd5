"""What ``hvdtrain test`` checks on every rank."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.distributed.replica_consistency import broadcast, weights_sha256
from hvdtrain.errors import HvdtrainError
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.trainer import Trainer

_STEPS = 8


def check_all() -> list[str]:
    """Returns a line for each check, or raises HvdtrainError for what does not work; all ranks must call it."""
    topology = runtime.init(seed=1)
    lines = [f"{topology.size} ranks, started by {topology.launcher}, rank 0 on {topology.device}"]
    lines += [_check_reduction(), _check_broadcast()]
    with tempfile.TemporaryDirectory() as folder:
        lines.append(_check_resuming(Path(folder)))
    return lines


def _check_reduction() -> str:
    collectives = runtime.current().collectives
    values = np.arange(100_000, dtype=np.float32)
    (total,) = collectives.sum([values * (collectives.rank + 1)])
    expected = values * sum(range(1, collectives.size + 1))
    _require(np.array_equal(total, expected), "the sum over ranks of 100,000 numbers is wrong")
    return "reduction: the sum of 100,000 numbers over all ranks is correct"


def _check_broadcast() -> str:
    collectives = runtime.current().collectives
    keras.utils.set_random_seed(collectives.rank)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer="adam", loss="mse")
    first, *others = collectives.allgather(weights_sha256(model))
    broadcast(model)
    _require(first not in others, "ranks with different seeds have equal weights before the broadcast")
    _require({first} == set(collectives.allgather(weights_sha256(model))), "ranks differ after the broadcast")
    return "broadcast: all ranks have rank 0's weights"


def _check_resuming(folder: Path) -> str:
    # Rank 0 writes; the others have separate folders.
    expected = _train(folder / "uninterrupted", _STEPS)
    stopped = _train(folder / "resumed", _STEPS // 2)
    resumed = _train(folder / "resumed", _STEPS)
    _require(stopped["resumed_from"] is None, "a new run has resumed from a checkpoint")
    _require(resumed["resumed_from"] == _STEPS // 2, "the run did not resume from its checkpoint")
    found = [expected["weights_sha256"], resumed["weights_sha256"]]
    _require(found[0] == found[1], "the resumed run's weights differ from those of the uninterrupted one")
    all_found = runtime.current().collectives.allgather(found)
    _require(all(each == found for each in all_found), "ranks have different weights after training")
    return (
        f"training, checkpoint, resuming at step {_STEPS // 2}: the same weights as an uninterrupted run, on all ranks"
    )


def _train(folder: Path, steps: int) -> dict[str, Any]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    x = np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32)
    config = TrainConfig(batch_size=4, steps=steps)
    checkpointer = Checkpointer(folder, model)
    return Trainer(model, Arrays(x, x[:, :1]), config, checkpointer=checkpointer, reporter=None).fit()


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise HvdtrainError(problem)
