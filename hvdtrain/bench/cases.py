"""The ways of training that are measured beside each other: by itself, by themselves, in step, now and then."""

import dataclasses
import math
import time

from hvdtrain import runtime
from hvdtrain.averaging import LocalTraining
from hvdtrain.building import make_model
from hvdtrain.config import BenchConfig, TrainConfig
from hvdtrain.failure import JobWatch
from hvdtrain.tasks import Data, Task
from hvdtrain.timing.clock import Clock
from hvdtrain.trainer import Trainer

ALONE, APART, SYNC, LOCAL = "one rank alone", "no communication", "sync", "local"
_NO_END = 10**9


@dataclasses.dataclass(frozen=True)
class Block:
    """What one rank did in one measurement."""

    steps: int
    seconds: float
    cpu_seconds: float
    """Of all threads of the rank."""
    samples: int


class Case:
    """One way of training, on this rank.

    Args:
        trainer: may be that of another case too.
        is_mine: False where this rank looks on.
    """

    def __init__(self, name: str, trainer: Trainer, *, is_mine: bool = True):
        self.name = name
        self.trainer = trainer
        self.is_mine = is_mine
        self.clock = Clock()

    def measure(self, steps: int) -> Block:
        """Makes steps, as the training loop would."""
        first = self.trainer.step
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        self.trainer.make_steps(steps, self.clock)
        seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return Block(steps, seconds, cpu_seconds, self.trainer.plan.own_samples(first, steps))


def make_cases(config: BenchConfig, task: Task, data: Data, watch: JobWatch) -> list[Case]:
    """Every rank has to call it. Each rank holds a model for each of them, but for the first, which is the second's."""
    collectives = runtime.current().collectives
    with runtime.by_itself():
        apart = make_trainer(config, task, data, watch)
    alone = Case(ALONE, apart, is_mine=collectives.rank == 0)
    if collectives.size == 1:
        return [alone]
    local = LocalTraining(
        every=config.average_every,
        slots=config.average_slots,
        outer=config.outer,
        outer_rate=config.outer_rate,
        outer_momentum=config.outer_momentum,
        overlap=config.overlap,
    )
    return [
        alone,
        Case(APART, apart),
        Case(SYNC, make_trainer(config, task, data, watch)),
        Case(LOCAL, make_trainer(config, task, data, watch, local)),
    ]


def steps_of_a_block(config: BenchConfig, cases: list[Case]) -> int:
    """As many as take the time that is asked for, in whole calls and whole rounds of local training; on every rank."""
    unit = math.lcm(config.steps_per_call, config.average_every if len(cases) > 1 else 1)
    for case in cases:
        case.measure(unit)  # compiles
        case.clock = Clock()
    collectives = runtime.current().collectives
    of_all = [case for case in cases if case.name != ALONE] or cases
    fastest_s = min(min(collectives.allgather(case.measure(unit).seconds)) for case in of_all)
    return unit * max(1, math.ceil(config.block_seconds / fastest_s))


def make_trainer(
    config: TrainConfig,
    task: Task,
    data: Data,
    watch: JobWatch,
    local: LocalTraining | None = None,
    *,
    log_every: int = _NO_END,
) -> Trainer:
    """One whose steps are those of a run of this configuration; it trains without end, and keeps nothing."""
    assert config.batch_size is not None
    return Trainer(
        make_model(config, task, data),
        data.training,
        batch_size=config.batch_size,
        steps=_NO_END,
        seed=config.seed,
        accumulate=config.accumulate,
        steps_per_call=config.steps_per_call,
        log_every=log_every,
        on_nan=config.on_nan,
        bad_samples=config.bad_samples,
        sync_batchnorm=config.sync_batchnorm,
        jit_compile=config.jit_compile,
        watch=watch,
        local=local,
    )
