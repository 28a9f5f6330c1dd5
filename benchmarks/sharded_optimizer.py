"""Time of a step and memory of a rank with a sharded optimizer, compared with one whose state every rank holds.

    launch/run python benchmarks/sharded_optimizer.py                      # 404 MB of weights, Adam, on 2 and 4 ranks
    launch/run python benchmarks/sharded_optimizer.py --ranks 2 --megabytes 100

Times: one job holds a model of either kind and makes their steps in turn, with the NaN guard and a global gradient norm
as in any run. Prints the ratio of the times of two neighbouring steps, median and middle half. Memory: a job for each
kind. Prints the bytes of the optimizer's variables, and the peak resident memory of the largest rank in three steps.
The last results are in ``benchmarks/results/sharded_optimizer.json``.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from memory import peak_bytes
from rank_jobs import measured_on_ranks, tell

HERE = Path(__file__).resolve().parent
LAYERS = 3
KINDS = ("whole", "sharded")


def run(kinds: list[str], megabytes: float, batch_size: int, pairs: int) -> None:
    """Runs on each rank; prints what was measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    from keras import layers

    from hvdtrain.distributed import runtime
    from hvdtrain.fault_tolerance.job_watch import JobWatch
    from hvdtrain.training.clock import Clock
    from hvdtrain.training.step_runner import StepRunner

    collectives = runtime.current().collectives
    width = 64 * round((megabytes * 1e6 / 4 / LAYERS) ** 0.5 / 64)
    x = np.random.default_rng(0).normal(size=(batch_size * topology.size, width)).astype(np.float32)
    before = peak_bytes()

    def runner(kind: str) -> StepRunner:
        model = keras.Sequential([layers.Input((width,)), *(layers.Dense(width) for _ in range(LAYERS))])
        optimizer = keras.optimizers.Adam(1e-4)
        model.compile(hvdtrain.DistributedOptimizer(optimizer, shard_optimizer=kind == "sharded"), "mse")
        config = hvdtrain.TrainConfig(batch_size=batch_size, steps=1)
        data = hvdtrain.data.Arrays(x, x)
        found = StepRunner(model, data, config, collectives=collectives, job_watch=JobWatch(collectives))
        found.start()
        return found

    def step_ms(one: StepRunner) -> float:
        collectives.barrier()
        began_s = time.perf_counter()
        one.run_steps(1, Clock())
        return 1000 * (time.perf_counter() - began_s)

    runners = [runner(kind) for kind in kinds]
    for _ in range(3):
        for each in runners:
            step_ms(each)
    peak = peak_bytes() - before
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(pairs):
        # Alternate the order, so that neither always runs second.
        for kind, one in list(zip(kinds, runners, strict=True))[:: 1 if i % 2 == 0 else -1]:
            times[kind].append(step_ms(one))
    model = runners[0].model
    state = sum(each.numpy().nbytes for each in model.optimizer.variables)
    weights = sum(each.numpy().nbytes for each in model.weights)
    found = {"rank": topology.rank, "weights": weights, "state": state, "peak": peak, "times": times}
    tell(found)


def measure(kinds: list[str], ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = [*kinds, "--megabytes", str(arguments.megabytes), "--batch-size", str(arguments.batch_size)]
    options += ["--pairs", str(arguments.pairs if len(kinds) > 1 else 0)]
    return measured_on_ranks(ranks, __file__, "--run", *options)


def compare(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    whole, sharded = (measure([kind], ranks, arguments) for kind in KINDS)
    times = measure(list(KINDS), ranks, arguments)[0]["times"]
    state = max(each["state"] for each in sharded) / whole[0]["state"]
    peak = [max(each["peak"] for each in found) / 1e6 for found in (whole, sharded)]
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    step_ms = {kind: statistics.median(each) for kind, each in times.items()}
    weights_mb, state_mb = (whole[0][name] / 1e6 for name in ("weights", "state"))
    print(
        f"{ranks} ranks, {weights_mb:.0f} MB of weights, batch {arguments.batch_size}; state {state_mb:.0f} MB, "
        f"sharded {state:.4f} of that; peak memory of a rank {peak[0]:.0f} MB, sharded {peak[1]:.0f} MB; "
        f"step {step_ms['whole']:.0f} ms, sharded {step_ms['sharded']:.0f} ms, ratio {median:.3f} "
        f"({low:.3f} to {high:.3f}) over {len(ratios)} pairs",
        flush=True,
    )
    return {"state": state, "peak_mb": peak, "step_ms": step_ms, "ratio": [low, median, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=404, help="weights of the model")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each rank in a step")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--run", nargs="*", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.megabytes, arguments.batch_size, arguments.pairs)
        return
    path = HERE / "results" / "sharded_optimizer.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for ranks in arguments.ranks:
        key = f"{ranks} ranks, {arguments.megabytes:.0f} MB, batch {arguments.batch_size}"
        found[key] = compare(ranks, arguments)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
