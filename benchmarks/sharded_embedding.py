"""Memory of a rank and time of a step with a sharded table, compared with replicated ones.

    launch/run python benchmarks/sharded_embedding.py                          # 4 million rows of 64, on 2 and 4 ranks
    launch/run python benchmarks/sharded_embedding.py --rows 400000 --ranks 2 --pairs 10

Ids are Zipf-distributed (exponent 1.05). Compared are ``hvdtrain.layers.ShardedEmbedding``, ``keras.layers.Embedding``
with sparse gradients, whose rows all ranks gather, and with dense gradients. Times: one job holds the models and makes
blocks of their steps in turn. Prints the ratios of the times of neighbouring blocks, median and middle half. Memory:
the bytes of the table and of its optimizer's state on each rank. Bytes: what a rank sends to others in a step for the
sharded table, and the least possible: the distinct rows of other ranks, out and back. The last results are in
``benchmarks/results/sharded_embedding.json``.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rank_jobs import measured_on_ranks, tell

HERE = Path(__file__).resolve().parent
KINDS = ("sharded", "sparse", "dense")
WIDTH, IDS_PER_SAMPLE, EXPONENT, WARM_UP = 64, 8, 1.05, 5


def run(arguments: argparse.Namespace) -> None:
    """Runs on each rank; prints what was measured as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers

    from hvdtrain.distributed import runtime
    from hvdtrain.fault_tolerance.job_watch import JobWatch
    from hvdtrain.tasks.dlrm import zipf_rows
    from hvdtrain.training.clock import Clock
    from hvdtrain.training.step_runner import StepRunner

    collectives = runtime.current().collectives
    rng = np.random.default_rng(0)
    count = 8 * arguments.batch_size * topology.size
    # Frequent ids are anywhere in the table.
    order = rng.permutation(arguments.rows).astype(np.int32)
    x = order[zipf_rows(rng, arguments.rows, (count, IDS_PER_SAMPLE), EXPONENT)]
    y = rng.normal(size=(count, 1)).astype(np.float32)

    def runner(kind: str) -> StepRunner:
        table = hvdtrain.layers.ShardedEmbedding if kind == "sharded" else layers.Embedding
        ids = keras.Input((IDS_PER_SAMPLE,), dtype="int32")
        pooled = layers.GlobalAveragePooling1D()(table(arguments.rows, WIDTH, name="table")(ids))
        model = keras.Model(ids, layers.Dense(1)(layers.Dense(64, activation="relu")(pooled)))
        optimizer = keras.optimizers.get({"class_name": arguments.optimizer, "config": {"learning_rate": 0.01}})
        model.compile(hvdtrain.DistributedOptimizer(optimizer, sparse_as_dense=kind == "dense"), "mse")
        config = hvdtrain.TrainConfig(batch_size=arguments.batch_size, steps=1)
        data = hvdtrain.data.Arrays(x, y)
        found = StepRunner(model, data, config, collectives=collectives, job_watch=JobWatch(collectives))
        found.start()
        return found

    def step_ms(one: StepRunner) -> float:
        collectives.barrier()
        began_s = time.perf_counter()
        one.run_steps(arguments.block, Clock())
        return 1000 * (time.perf_counter() - began_s) / arguments.block

    def bytes_of(one: StepRunner) -> int:
        model = one.model
        return sum(each.numpy().nbytes for each in [*model.weights, *model.optimizer.variables] if "table" in each.path)

    kinds = [kind for kind in KINDS if kind in arguments.kinds]
    runners = {kind: runner(kind) for kind in kinds}
    for each in runners.values():
        each.run_steps(WARM_UP, Clock())
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for i in range(arguments.pairs):
        for kind in kinds[:: 1 if i % 2 == 0 else -1]:
            times[kind].append(step_ms(runners[kind]))

    # A step of the table alone, whose messages are counted.
    sent = 0
    exchange = collectives.exchange_parts

    def counted(tensor: tf.Tensor, lengths: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        nonlocal sent
        to_others = sum(int(each) for rank, each in enumerate(lengths) if rank != topology.rank)
        sent += to_others * tensor.dtype.size * (tensor.shape[1] if tensor.shape.rank > 1 else 1)
        return exchange(tensor, lengths, name)

    own = x[topology.rank :: topology.size][: arguments.batch_size]
    if "sharded" in runners:
        table = runners["sharded"].model.get_layer("table")
        collectives.exchange_parts = counted
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(table(own))
        tape.gradient(value, table.trainable_variables[0].value)
        del collectives.exchange_parts
    distinct = np.unique(own)
    asked = int(np.sum(distinct % topology.size != topology.rank))
    everyone = collectives.allgather((sent, asked))
    least = 2 * 4 * WIDTH * sum(each for _, each in everyone)
    found = {
        "rank": topology.rank,
        "times": times,
        "bytes": {kind: bytes_of(each) for kind, each in runners.items()},
        "distinct": len(distinct),
        "sent": sum(each for each, _ in everyone),
        "least": least,
    }
    tell(found)


def measure(ranks: int, optimizer: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = ["--rows", str(arguments.rows), "--kinds", *arguments.kinds, "--batch-size", str(arguments.batch_size)]
    options += ["--pairs", str(arguments.pairs), "--block", str(arguments.block), "--optimizer", optimizer]
    return measured_on_ranks(ranks, __file__, "--run", *options)


def compare(ranks: int, optimizer: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found = measure(ranks, optimizer, arguments)
    times, first = found[0]["times"], found[0]
    result: dict[str, Any] = {
        "step_ms": {kind: statistics.median(each) for kind, each in times.items()},
        "bytes": {kind: max(each["bytes"][kind] for each in found) for kind in times},
        "distinct_rows": first["distinct"],
        "sent_bytes": first["sent"],
        "least_bytes": first["least"],
        "times_as_long_as_sharded": {},
    }
    for kind in [each for each in times if each != "sharded"]:
        ratios = [b / a for a, b in zip(times["sharded"], times[kind], strict=True)]
        result["times_as_long_as_sharded"][kind] = statistics.quantiles(ratios, n=4)
    megabytes = ", ".join(f"{kind} {each / 1e6:.1f} MB" for kind, each in result["bytes"].items())
    ratios_text = "; ".join(
        f"{kind} {median:.2f} times as long ({low:.2f} to {high:.2f})"
        for kind, (low, median, high) in result["times_as_long_as_sharded"].items()
    )
    sent, least = result["sent_bytes"] / 1e6, result["least_bytes"] / 1e6
    print(
        f"{ranks} ranks, {arguments.rows:,} x {WIDTH}, {optimizer}, batch {arguments.batch_size} of {IDS_PER_SAMPLE} "
        f"ids: rows and state on a rank {megabytes}; step {result['step_ms']['sharded']:.1f} ms sharded, "
        f"{ratios_text}, over {arguments.pairs} blocks of {arguments.block} steps; all ranks send {sent:.2f} MB a step "
        f"for the table, least {least:.2f} MB",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch-size", type=int, default=512, help="samples of each rank in a step")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--optimizers", nargs="*", default=["sgd", "adagrad"])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=4, help="steps of a block")
    parser.add_argument("--optimizer", help=argparse.SUPPRESS)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments)
        return
    path = HERE / "results" / "sharded_embedding.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for ranks in arguments.ranks:
        for optimizer in arguments.optimizers:
            key = f"{ranks} ranks, {arguments.rows} rows, {optimizer}, batch {arguments.batch_size}"
            found[key] = compare(ranks, optimizer, arguments)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
