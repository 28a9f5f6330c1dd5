"""The ways of training that are measured side by side: one rank alone, independent ranks, sync mode, local SGD."""

import dataclasses
import math
import time

from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.building import make_model
from hvdtrain.commands.session import Session
from hvdtrain.data import Data
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.optim.learning_rate import hold_weights
from hvdtrain.tasks.task import Task
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import sync_config
from hvdtrain.training.step_runner import StepRunner

ALONE, INDEPENDENT, SYNC, LOCAL = "one rank alone", "no communication", "sync", "local"


@dataclasses.dataclass(frozen=True)
class Block:
    """What one rank did in one measurement."""

    steps: int
    seconds: float
    cpu_seconds: float
    """CPU time of all threads of the rank."""
    samples: int


class Case:
    """One way of training, on this rank.

    Args:
        runner: may be shared with another case.
        takes_part: False if this rank idles.
    """

    def __init__(self, name: str, runner: StepRunner, *, takes_part: bool = True):
        self.name = name
        self.runner = runner
        self.takes_part = takes_part
        self.clock = Clock()

    def measure(self, steps: int) -> Block:
        """Makes steps as the training loop does."""
        first = self.runner.step
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self.runner.run_steps(steps, self.clock)
        seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return Block(steps, seconds, cpu_seconds, self.runner.plan.own_samples(first, steps))


def make_cases(config: BenchConfig, task: Task, data: Data, session: Session) -> list[Case]:
    """All ranks must call it. Each rank holds a model for each case but the first, which shares the second's."""
    collectives = session.collectives
    independent = make_runner(config, task, data, session, SingleProcessCollectives(), mode="sync")
    alone = Case(ALONE, independent, takes_part=collectives.rank == 0)
    if collectives.size == 1:
        return [alone]
    return [
        alone,
        Case(INDEPENDENT, independent),
        Case(SYNC, make_runner(config, task, data, session, collectives, mode="sync")),
        Case(LOCAL, make_runner(config, task, data, session, collectives, mode="local")),
        *(
            Case(
                compressed(name),
                make_runner(_with_compression(config, name), task, data, session, collectives, mode="sync"),
            )
            for name in config.measurement.measured_compressions
        ),
    ]


def compressed(name: str) -> str:
    """The name of the case of sync mode with a compression."""
    return f"{SYNC}, {name}"


def _with_compression(config: BenchConfig, name: str) -> BenchConfig:
    reduction = dataclasses.replace(config.reduction, compression=name, compression_after=0)
    return dataclasses.replace(config, reduction=reduction)


def make_runner(
    config: BenchConfig, task: Task, data: Data, session: Session, collectives: Collectives, *, mode: str
) -> StepRunner:
    """Makes the steps of a run of this configuration, in sync mode or by local SGD; the weights hardly change."""
    training = config.training if mode == "local" else sync_config(config.training)
    model = make_model(config, task, data, collectives)
    hold_weights(model)
    runner = StepRunner(
        model,
        data.training,
        training,
        collectives=collectives,
        job_watch=session.job_watch,
    )
    runner.start()
    return runner


def steps_per_block(config: BenchConfig, cases: list[Case], collectives: Collectives) -> int:
    """Steps that take the minimum duration, in whole calls and whole rounds of local SGD; the same on every rank."""
    training = config.training
    unit = math.lcm(training.steps_per_execution, training.local_sgd.sync_every if len(cases) > 1 else 1)
    for case in cases:
        case.measure(unit)  # compiles
        case.clock = Clock()
    of_all = [case for case in cases if case.name != ALONE] or cases
    fastest_s = min(min(collectives.allgather(case.measure(unit).seconds)) for case in of_all)
    return unit * max(1, math.ceil(config.measurement.block_seconds / fastest_s))
