"""Throughput with stragglers: one of four ranks takes twice as long, or is stopped, or any is held up; in all modes.

    launch/run mpirun -np 4 python benchmarks/uneven_ranks.py
    launch/run horovodrun --gloo -np 4 python benchmarks/uneven_ranks.py
    launch/run mpirun -np 4 python benchmarks/uneven_ranks.py --hold-ups 0.02 --modes quorum --rates-only

A layer sleeps for each sample, twice as long on the last rank; with ``--hold-ups``, all ranks are equally fast, but
this share of their micro-batches takes a second longer (``--hold-up-s``). Prints the samples per second of all ranks,
relative to sync training in the same repetition. Runs stay within one epoch, because in every mode ranks synchronize
at its end and for evaluation. Then stops the last rank for ten seconds and prints how
many steps rank 0 makes in each second. The last results are in ``benchmarks/results/uneven_ranks-*.json``;
``benchmarks/local_figure.py`` plots them.
"""

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import hvdtrain

topology = hvdtrain.init(seed=0)
import keras
import numpy as np
from delays import Curve, Delay
from keras import layers

from hvdtrain import BalanceConfig, LocalSGDConfig, QuorumConfig
from hvdtrain.data import Arrays, Data, evaluation_dataset
from hvdtrain.distributed import runtime
from hvdtrain.tasks.loading import load_task

BATCH_SIZE, EVERY = 32, 16
EPOCH_REPEATS = 40  # of the digits: longer than a run
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "balance": {"balancing": BalanceConfig(balance=True, balance_every=5)},
    "quorum": {"stragglers": QuorumConfig(quorum=max(1, topology.size - 1))},
    "quorum of half": {"stragglers": QuorumConfig(quorum=max(1, topology.size // 2))},
    "local": {"mode": "local", "local_sgd": LocalSGDConfig(sync_every=EVERY)},
    "overlap": {"mode": "local", "local_sgd": LocalSGDConfig(sync_every=EVERY, overlap=True)},
    "wait-free": {"mode": "local", "local_sgd": LocalSGDConfig(sync_every=EVERY, wait_free=True)},
}


def train(mode: str, steps: int, *, eval_every: int, at_step: dict[int, Any] | None = None) -> dict[str, Any]:
    options = arguments()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    is_slow = topology.rank == topology.size - 1
    factor = options.factor if is_slow and not options.hold_ups else 1
    delay = Delay(factor * options.step_s / BATCH_SIZE, options.hold_ups, options.hold_up_s)
    delay.at_step = dict(at_step or {})
    task = load_task("digits")
    data = task.read_data(None)
    inner = task.make_model(data)
    network = [layers.Flatten(), layers.Dense(10)] if options.small_network else inner.layers
    model = keras.Sequential([layers.Input(inner.input_shape[1:]), delay, *network])
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=task.make_loss())
    x, y = next(iter(evaluation_dataset(data.training, data.training.num_samples, rank=0, size=1)))
    repeated = Arrays(np.tile(x, (EPOCH_REPEATS, 1, 1, 1)), np.tile(y, EPOCH_REPEATS))
    curve = Curve()
    config = hvdtrain.TrainConfig(
        **MODES[mode],
        batch_size=BATCH_SIZE,
        steps=steps,
        eval_every=eval_every,
        guards=hvdtrain.GuardConfig(check_every=0),
        logging=hvdtrain.LoggingConfig(log_every=steps),
    )
    summary = hvdtrain.Trainer(model, Data(repeated, data.evaluation), config, callbacks=[curve], reporter=None).fit()
    # Measured from the end of the tenth step, because the first ones compile.
    ends_s = delay.step_ends_s
    samples_per_s = BATCH_SIZE * (len(ends_s) - 10) / (ends_s[-1] - ends_s[9])
    if mode in ("sync", "quorum", "quorum of half"):
        # Those that were trained on: a micro-batch that was too late is computed again.
        samples_per_s = summary["examples_per_second"] / topology.size
    return {
        # With --balance, this rank has more or fewer: summed over ranks, this is right all the same.
        "samples_per_s": samples_per_s,
        "late": summary.get("dropped_micro_batches"),
        "step_ends_s": ends_s,
        "curve": [[moment - ends_s[0], loss] for moment, loss in curve.points],
        "steps": summary["steps"],
    }


def sum_over_ranks(value: float) -> float:
    return sum(runtime.current().collectives.allgather(value))


def stopped_for_ten_seconds() -> list[int]:
    """The steps that rank 0 makes in each second while the last rank is stopped."""
    is_slow = topology.rank == topology.size - 1
    moments: list[float] = []

    def stop() -> None:
        moments.append(time.time())
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    run = train("wait-free", 250, eval_every=250, at_step={30: stop} if is_slow else {})
    began_s = max(each[0] if each else 0.0 for each in runtime.current().collectives.allgather(moments))
    return [sum(began_s + i <= each < began_s + i + 1 for each in run["step_ends_s"]) for i in range(10)]


@functools.cache
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rates-only", action="store_true", help="measure the samples per second and nothing else")
    parser.add_argument(
        "--small-network",
        action="store_true",
        help="one layer instead of the digits' network, so that ranks that share cores do not slow each other down",
    )
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a micro-batch")
    parser.add_argument("--factor", type=float, default=2.0, help="how much longer the last rank takes")
    parser.add_argument("--hold-ups", type=float, default=0.0, help="share of micro-batches that are held up")
    parser.add_argument("--hold-up-s", type=float, default=1.0, help="seconds of a hold-up")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    modes = list(dict.fromkeys(["sync", *options.modes]))
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(options.repeats):
        for mode in modes:
            rates[mode].append(sum_over_ranks(train(mode, options.steps, eval_every=options.steps)["samples_per_s"]))
    if topology.rank == 0:
        for mode, values in rates.items():
            ratios = [value / sync for value, sync in zip(values, rates["sync"], strict=True)]
            print(
                f"{topology.launcher}, {mode}: {statistics.median(values):.0f} samples/s, "
                f"{statistics.median(ratios):.2f}x sync ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    if options.rates_only:
        return
    # Separate runs, because ranks synchronize for evaluation.
    runs = {mode: [{"curve": train(mode, options.steps, eval_every=10)["curve"]}] for mode in modes}
    counts = stopped_for_ten_seconds()
    if topology.rank != 0:
        return
    print(f"steps of rank 0 per second while the last rank is stopped: {counts}")
    name = "gloo" if "gloo" in topology.launcher else "mpi"
    path = Path(__file__).parent / "results" / f"uneven_ranks-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rates": rates, "runs": runs, "stopped": counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
