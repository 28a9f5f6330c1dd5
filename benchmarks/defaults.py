"""The settings that hvdtrain chooses for a rank, compared with others: two ranks on this machine, interleaved.

    launch/run python benchmarks/defaults.py

Starts a job per setting in several rounds, and prints the median step time and its range. The cost of
polling also shows in the case without communication.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

# Name to environment of the ranks; {}: hvdtrain's defaults.
SETTINGS = {
    "defaults of Open MPI and Horovod": {"OMPI_MCA_mpi_yield_when_idle": "0", "HOROVOD_CYCLE_TIME": "1"},
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
    from trainer_steps import step_ms, trainer_steps

    from hvdtrain.distributed import runtime
    from hvdtrain.distributed.single_process import SingleProcessCollectives

    barrier = runtime.current().collectives.barrier
    results: dict[str, float] = {}
    blocks = {}
    for name in STEPS:
        for case, options in CASES.items():
            for steps_per_execution in (1, 10):
                collectives = None if options["distributed"] else SingleProcessCollectives()
                train_step = trainer_steps(
                    name, steps_per_execution, groups=options.get("groups"), collectives=collectives
                )

                def block(train_step=train_step, num_steps=STEPS[name]) -> float:
                    barrier()
                    return step_ms(train_step, num_steps)

                block()
                blocks[f"{name}, {steps_per_execution} step(s) per call, {case}"] = block
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
