"""The settings that hvdtrain chooses for a rank, against others: two ranks on this machine, in turn.

    launch/run python benchmarks/defaults.py

Starts a job for each setting, round after round, and prints the median time of a step and its range.
What a setting makes of the machine's polling shows also where nothing is averaged.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

# Name to the environment of the ranks; {} leaves all to hvdtrain.
SETTINGS = {
    "Open MPI and Horovod as they come": {"OMPI_MCA_mpi_yield_when_idle": "0", "HOROVOD_CYCLE_TIME": "1"},
    "yield": {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "1"},
    "yield, cycle 0.1 ms": {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.1"},
    "yield, cycle 0.5 ms": {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.5"},
    "cycle 0.1 ms, fusion": {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": str(128 << 20)},
    "fusion": {"HOROVOD_FUSION_THRESHOLD": str(128 << 20)},
    "hvdtrain's defaults": {},
}
CASES = {
    "no communication": {"distributed": False},
    "averaged": {"distributed": True},
    "averaged, one group": {"distributed": True, "groups": 1},
}
STEPS = {"cnn": 20, "mlp": 500}
BLOCKS = 5


def measure() -> None:
    """Runs on each rank; rank 0 prints the times as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import keras
    from networks import NETWORKS, compiled, endless_batches, step_ms

    from hvdtrain import runtime
    from hvdtrain.steps import CompiledSteps

    barrier = runtime.current().collectives.barrier
    results: dict[str, float] = {}
    blocks = {}
    for name in STEPS:
        for case, options in CASES.items():
            for steps_per_call in (1, 10):
                optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
                if options["distributed"]:
                    hvdtrain.DistributedOptimizer(optimizer, groups=options.get("groups"))
                model = compiled(NETWORKS[name][0](), optimizer)
                steps = CompiledSteps(model, steps_per_call=steps_per_call, accumulate=1)
                batches = endless_batches(name)

                def block(steps=steps, batches=batches, num_steps=STEPS[name]) -> float:
                    barrier()
                    return step_ms(steps, batches, num_steps)

                block()
                blocks[f"{name}, {steps_per_call} step(s) a call, {case}"] = block
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(BLOCKS):
        for name, block in blocks.items():
            times[name].append(block())
    results = {name: statistics.median(each) for name, each in times.items()}
    if topology.rank == 0:
        print("RESULT " + json.dumps(results), flush=True)


def run_job(settings: dict[str, str], ranks: int) -> dict[str, float]:
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]  # as horovodrun does
    job = subprocess.run(
        ["mpirun", *flags, sys.executable, __file__, "--rank"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in job.stdout.splitlines() if line.startswith("RESULT ")]
    if job.returncode != 0 or len(lines) != 1:
        sys.exit(f"a job failed with {job.returncode}:\n{job.stdout}\n{job.stderr}")
    return json.loads(lines[0].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure()
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name, settings in SETTINGS.items():
            results[name].append(run_job(settings, arguments.ranks))
    for case in results["hvdtrain's defaults"][0]:
        print(case)
        for name, rounds in results.items():
            times = [each[case] for each in rounds]
            print(f"    {name:36} {statistics.median(times):7.3f} ms ({min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()
