"""What --autotune tries, chooses and remembers, with fake speeds; tests/parallel/test_jobs.py lets it measure."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from hvdtrain.commands.autotune import choices, trials, tuning, xla_trial
from hvdtrain.commands.autotune.suggestion import suggestion
from hvdtrain.commands.autotune.trials import Candidate
from hvdtrain.commands.building import with_task_defaults
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session
from hvdtrain.config import exclusions
from hvdtrain.config.fields import as_dict, with_options
from hvdtrain.data import Arrays, Data
from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import environment
from hvdtrain.system.launcher import _LAUNCHERS, find_launcher
from hvdtrain.tasks.loading import load_task
from hvdtrain.tasks.task import Task


class TwoRanks(SingleProcessCollectives):
    """The other rank takes twice as long."""

    size = 2

    def allgather(self, value):
        return [value, 2 * value]


@pytest.fixture
def time_s(monkeypatch):
    """A clock that only steps advance."""
    now = [0.0]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    return now


def fakes(now, step_ms, made):
    """Step runners whose step time depends on the settings."""

    class Fake:
        def __init__(self, config):
            settings = (config.training.steps_per_execution, config.reduction.groups)
            self.seconds = step_ms[settings] / 1000
            made.append(settings)

        def run_steps(self, steps, clock):
            now[0] += steps * self.seconds

    return Fake


def config(**options):
    return with_options(RunConfig(explicitly_set=frozenset(options)), options)


SPEEDS = {(1, None): 2.0, (4, None): 1.5, (16, None): 1.0, (16, 1): 0.8, (1, 1): 1.9, (7, None): 3.0, (7, 1): 3.0}


def tuned(asked, collectives, time_s, speeds=SPEEDS):
    made = []
    session = Session(collectives, JobWatch(SingleProcessCollectives()))
    make = lambda config: Candidate(config, fakes(time_s, speeds, made), session)
    settings = trials.settings_to_try(asked, collectives)
    chosen, found = trials.try_settings(make(asked), settings, make)
    return chosen, found, made


def settings(chosen):
    return chosen.training.steps_per_execution, chosen.reduction.groups


def test_the_fastest_is_chosen(time_s):
    chosen, found, _ = tuned(config(), TwoRanks(), time_s)
    assert settings(chosen) == (16, 1)
    # The slower rank's time counts.
    assert [each.step_ms for each in found] == pytest.approx([4.0, 3.0, 2.0, 2.0, 1.6])
    assert trials.describe(found, chosen) == (
        "--steps-per-execution 16, --groups 1: steps 60% shorter (time of a step with "
        "--steps-per-execution 1: 4.000 ms; --steps-per-execution 4: 3.000 ms; --steps-per-execution 16: 2.000 ms; "
        "--groups default: 2.000 ms; "
        "--groups 1: 1.600 ms)"
    )


def test_defaults_are_kept_if_nothing_is_gained(time_s):
    speeds = dict.fromkeys(SPEEDS, 1.0) | {(16, None): 0.99, (1, 1): 0.99}
    chosen, found, _ = tuned(config(), TwoRanks(), time_s, speeds)
    assert settings(chosen) == (1, None)
    assert "--groups default: no setting makes steps shorter (" in trials.describe(found, chosen)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"steps_per_execution": 7}, [(7, None), (7, 1)]),
        ({"groups": 1}, [(1, 1), (4, 1), (16, 1)]),
        # Other groups are other sums.
        ({"deterministic": True}, [(1, None), (4, None), (16, None)]),
        ({"op": "adasum"}, [(1, None), (4, None), (16, None)]),
        ({"mode": "local"}, [(1, None), (4, None), (16, None)]),
        ({"steps_per_execution": 7, "deterministic": True}, [(7, None)]),
    ],
)
def test_what_is_not_tried(options, made, time_s):
    speeds = SPEEDS | {(4, 1): 1.0}
    chosen, _, found = tuned(config(**options), TwoRanks(), time_s, speeds)
    assert found == made
    assert all(as_dict(chosen)[name] == value for name, value in options.items())


def test_a_default_of_the_task_is_the_one_that_others_are_compared_with(time_s):
    asked = with_options(RunConfig(), {"steps_per_execution": 7})
    chosen, found, _ = tuned(asked, SingleProcessCollectives(), time_s)
    assert [each.value for each in found] == [7, 1, 4, 16]
    assert trials.describe(found, chosen).startswith("--steps-per-execution 16: steps 67% shorter")


def test_one_rank_has_no_groups(time_s):
    assert tuned(config(), SingleProcessCollectives(), time_s)[2] == [(1, None), (4, None), (16, None)]


def test_copies_ahead_are_tried_on_a_gpu(monkeypatch):
    monkeypatch.setattr(trials.devices, "has_gpu", lambda: True)
    found = trials.settings_to_try(config(), SingleProcessCollectives())
    assert found["prefetch_to_device"] == (False, True)
    assert not xla_trial.is_possible(config())  # There it is the default.


def test_a_job_that_is_asked_to_stop(time_s, monkeypatch):
    monkeypatch.setattr(JobWatch, "check", lambda self: True)
    with pytest.raises(StoppedEarly, match="Nothing was trained"):
        tuned(config(), SingleProcessCollectives(), time_s)


@dataclasses.dataclass
class Rounds:
    """Runs of --autotune, one after another, with one cache."""

    made: list
    xla: list

    def tune(self, **options):
        """The run's choice, the line about it, and the number of step runners that were made."""
        self.made.clear()
        self.xla.clear()
        keras.backend.clear_session()  # Layers are named as in a new process.
        asked = config(**{"optimizer": "sgd", "learning_rate": 0.1, **options})
        session = Session(SingleProcessCollectives(), JobWatch(SingleProcessCollectives()))
        chosen, line = tuning._Tuning(with_task_defaults(asked, TASK), TASK, read_data(None), session).choose()
        return chosen, line, len(self.made)


WIDTH = [2]


def make_model(data):
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(WIDTH[0]), keras.layers.Dense(1)])


def read_data(folder):
    return Data(Arrays(np.ones((64, 3), np.float32), np.ones((64, 1), np.float32)))


TASK = Task(model=make_model, data=read_data, loss="mse")


@pytest.fixture
def rounds(monkeypatch, tmp_path, time_s):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.init(seed=0)
    made, xla = [], []
    make = fakes(time_s, SPEEDS, made)
    monkeypatch.setattr(tuning._Tuning, "_runner", lambda self, trial: make(trial))
    monkeypatch.setattr(xla_trial, "report", lambda *_, **limits: xla.append(limits) or "--jit-compile …")
    return Rounds(made, xla)


LONG, SHORT = 10**6, 10**3
FASTEST = {"steps_per_execution": 16}


def test_a_choice_is_remembered(rounds, tmp_path):
    chosen, line, made = rounds.tune(steps=LONG)
    assert (settings(chosen), made, len(rounds.xla)) == ((16, None), 3, 1)
    assert line.startswith("--steps-per-execution 16: steps 50% shorter (")
    assert line.endswith("); --jit-compile …")
    (file,) = (tmp_path / "hvdtrain" / "autotune").iterdir()
    assert json.loads(file.read_text())["options"] == FASTEST
    # Neither its length nor its learning rate changes the time of a step.
    for other in ({"steps": LONG}, {"steps": SHORT}, {"steps": LONG, "lr_decay": "cosine", "seed": 7, "keep": 2}):
        again, later, made = rounds.tune(**other)
        assert (settings(again), made, len(rounds.xla)) == ((16, None), 0, 0)
        assert later == f"{line} (as measured in an earlier run; to measure again, delete {file})"


@pytest.mark.parametrize("other", [{"batch_size": 16}, {"clip_norm": 1.0}, {"check_every": 7}, {"optimizer": "adam"}])
def test_other_steps_are_measured_again(rounds, other):
    rounds.tune(steps=LONG)
    assert rounds.tune(steps=LONG, **other)[2] > 0


def test_other_models_machines_and_versions_are_measured_again(rounds, monkeypatch):
    rounds.tune(steps=LONG)
    for target, name, value in (
        (choices.cores, "usable_cores", lambda: 77),
        (choices.versions, "versions", lambda: {"keras": "other"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert rounds.tune(steps=LONG)[2] == 3
    monkeypatch.setattr("test_autotune.WIDTH", [5])
    assert rounds.tune(steps=LONG)[2] == 3
    monkeypatch.undo()


@pytest.mark.slow
def test_trials_take_a_small_share_of_the_run(rounds):
    """Steps of 2 ms: two other settings are made, all three measured for 5 blocks, and XLA takes 8 s and 2 x 5 blocks.

    Blocks last 0.3 s; to make a setting is to make a step here.
    """
    cost_s = 2 * 0.002 + 3 * 5 * 0.3 + 8 + 5 * 0.002 + 2 * 5 * 0.3
    for steps, share, num_made in ((10_000, 0.05, 1), (10_000, 0.05, 0), (100_000, 0.01, 0)):
        chosen, line, made = rounds.tune(steps=steps, autotune_limit=share)
        assert (settings(chosen), made, rounds.xla) == ((1, None), num_made, [])
        assert line == (
            f"settings were not tried: it would take about {cost_s:.0f} s, and the run {steps * 0.002:.0f} s "
            f"({steps:,} steps of 2 ms). --autotune-limit is {share}"
        )
    steps = int(cost_s / 0.05 / 0.002)
    assert rounds.tune(steps=steps - 1000)[2] == 0
    chosen, _, made = rounds.tune(steps=steps + 1000)
    assert (settings(chosen), made) == ((16, None), 3)
    assert rounds.xla == [{"timeout_s": pytest.approx(cost_s, rel=0.1)}]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{}",
        '{"step_s": 1, "cost_s": 1, "options": {"steps_per_execution": 5}, "summary": ""}',
        '{"step_s": 1, "cost_s": 1, "options": {"run_dir": "x"}, "summary": ""}',
        '{"step_s": 1, "cost_s": 1, "options": {"steps_per_execution": 4, "run_dir": "x"}, "summary": ""}',
        '{"step_s": "1", "cost_s": 1, "options": null, "summary": ""}',
        '{"step_s": 1, "cost_s": 1, "options": [1], "summary": ""}',
        '{"step_s": 1, "cost_s": 1, "options": {"steps_per_execution": 4}, "summary": "", "more": 1}',
    ],
)
def test_a_damaged_file_is_no_choice(tmp_path, damage):
    (tmp_path / "choice.json").write_text(damage)
    assert choices.read(tmp_path / "choice.json", {"steps_per_execution": (1, 4)}) is None


def test_a_damaged_file_is_replaced(rounds, tmp_path):
    rounds.tune(steps=LONG)
    (file,) = (tmp_path / "hvdtrain" / "autotune").iterdir()
    file.write_text("{")
    assert rounds.tune(steps=LONG)[2] == 3
    assert json.loads(file.read_text())["options"] == FASTEST


def test_a_cache_that_cannot_be_written_is_no_error(rounds, tmp_path):
    (tmp_path / "hvdtrain").write_text("a file")
    for _ in range(2):
        assert settings(rounds.tune(steps=LONG)[0]) == (16, None)


def test_nothing_to_try(rounds):
    assert rounds.tune(steps=LONG, steps_per_execution=7, deterministic=True)[1:] == ("nothing to try", 0)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf")])
def test_limits(limit):
    with pytest.raises(UsageError, match="autotune_limit must be a finite number above 0"):
        config(autotune_limit=limit)


@pytest.mark.parametrize(
    ("options", "is_possible"),
    [
        ({}, True),
        ({"jit_compile": False}, False),
        ({"deterministic": True}, False),
        ({"shares": "1,2"}, False),
        ({"mode": "local", "sync_every": 4}, True),
    ],
)
def test_where_xla_is_tried(options, is_possible):
    assert xla_trial.is_possible(config(**options)) == is_possible


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((0.004, 0.003), "--jit-compile, which rounds differently and is not chosen here, would make them 25% shorter"),
        ((0.004, 0.0039), "--jit-compile would not make steps shorter (without communication 7.800 ms with it, 8.000"),
        (None, "--jit-compile could not be tried"),
    ],
)
def test_what_is_said_about_xla(found, said, monkeypatch):
    runtime.init()
    asked = []
    monkeypatch.setattr(xla_trial, "_run", lambda options, timeout_s: asked.append((options, timeout_s)) or found)
    collectives = SingleProcessCollectives()
    if found is not None:
        collectives = TwoRanks()
        collectives.allgather = lambda value: [value, tuple(2 * each for each in value)]
    session = Session(collectives, JobWatch(SingleProcessCollectives()))
    large = config(global_batch_size=9, stall_timeout=20.0)
    assert xla_trial.report(large, read_data(None), session, timeout_s=90).startswith(said)
    ((options, timeout_s),) = asked
    # The other ranks must not take a rank that waits for XLA for one that hangs.
    assert timeout_s == 10
    assert (options["batch_size"], options["global_batch_size"]) == (9 if found is None else 5, None)


@pytest.mark.parametrize("launcher", _LAUNCHERS, ids=lambda each: each.name)
def test_the_process_that_tries_xla_is_no_rank(launcher, monkeypatch):
    for names in (launcher.rank, launcher.size, launcher.local_size):
        for name in names:
            monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "a:1")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    env = environment.lone_process_environment()
    assert find_launcher(env).name == "none"
    assert not [name for name in env if name.startswith(("HVDTRAIN_ELASTIC", "HOROVOD_"))]
    assert {"PATH", "HOME"} <= env.keys()


@pytest.mark.slow
def test_xla_is_measured_in_another_process():
    options = as_dict(with_task_defaults(config(steps=1), load_task("digits")))
    plain_s, xla_s = xla_trial._run(options, 60)
    assert plain_s > 0
    assert xla_s > 0
    assert plain_s != xla_s
    assert xla_trial._run(options, 0.1) is None
    assert xla_trial._run({**options, "task": "none.such:TASK"}, 60) is None


SUMMARY = {"wall_seconds": 700.0, "step_ms": {"p50": 1.23}}


def test_long_runs_of_short_steps_are_told():
    line = "steps took 1.2 ms each: --autotune tries whether other settings make them shorter"
    assert suggestion(config(), SUMMARY, {}) == line
    elastic = exclusions.facts_from(exclusions.ELASTIC)
    for options, summary, conditions in (
        ({"autotune": True}, {}, {}),
        ({"steps_per_execution": 1}, {}, {}),
        ({"quorum": 1}, {}, {}),
        ({}, {"wall_seconds": 599.0}, {}),
        ({}, {"step_ms": {"p50": 5.1}}, {}),
        ({}, {}, elastic),
    ):
        assert suggestion(config(**options), {**SUMMARY, **summary}, conditions) is None
    assert suggestion(with_options(RunConfig(), {"steps_per_execution": 10}), SUMMARY, {}) is None
