"""Which settings --autotune chooses, with fake speeds; tests/parallel/test_jobs.py lets it measure."""

import pytest

from hvdtrain.commands import autotune
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.session import Session
from hvdtrain.config.fields import as_dict, with_options
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.job_watch import JobWatch


class TwoRanks(SingleProcessCollectives):
    """The other rank takes twice as long."""

    size = 2

    def allgather(self, value):
        return [value, 2 * value]


@pytest.fixture
def time_s(monkeypatch):
    """A clock that only steps advance."""
    now = [0.0]
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now[0])
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
    chosen, trials = autotune.try_settings(asked, fakes(time_s, speeds, made), session)
    return chosen, trials, made


def settings(chosen):
    return chosen.training.steps_per_execution, chosen.reduction.groups


def test_the_fastest_is_chosen(time_s):
    chosen, trials, _ = tuned(config(), TwoRanks(), time_s)
    assert settings(chosen) == (16, 1)
    # The slower rank's time counts.
    assert [each.step_ms for each in trials] == pytest.approx([4.0, 3.0, 2.0, 2.0, 1.6])
    assert autotune.describe(trials, chosen) == (
        "--steps-per-execution 16, --groups 1: steps 60% shorter (time of a step with "
        "--steps-per-execution 1: 4.000 ms; --steps-per-execution 4: 3.000 ms; --steps-per-execution 16: 2.000 ms; "
        "--groups default: 2.000 ms; "
        "--groups 1: 1.600 ms)"
    )


def test_defaults_are_kept_if_nothing_is_gained(time_s):
    speeds = dict.fromkeys(SPEEDS, 1.0) | {(16, None): 0.99, (1, 1): 0.99}
    chosen, trials, _ = tuned(config(), TwoRanks(), time_s, speeds)
    assert settings(chosen) == (1, None)
    assert "--groups default: no setting makes steps shorter (" in autotune.describe(trials, chosen)


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"steps_per_execution": 7}, [(7, None), (7, 1)]),
        ({"groups": 1}, [(1, 1), (4, 1), (16, 1)]),
        # Other groups are other sums.
        ({"deterministic": True}, [(1, None), (4, None), (16, None)]),
        ({"op": "adasum"}, [(1, None), (4, None), (16, None)]),
        ({"mode": "local"}, [(1, None), (4, None), (16, None)]),
        ({"steps_per_execution": 7, "deterministic": True}, []),
    ],
)
def test_what_is_not_tried(options, made, time_s):
    speeds = SPEEDS | {(4, 1): 1.0}
    chosen, trials, found = tuned(config(**options), TwoRanks(), time_s, speeds)
    assert found == made
    assert all(as_dict(chosen)[name] == value for name, value in options.items())
    if not made:
        assert autotune.describe(trials, chosen) == "nothing to try"


def test_one_rank_has_no_groups(time_s):
    assert tuned(config(), SingleProcessCollectives(), time_s)[2] == [(1, None), (4, None), (16, None)]


def test_a_job_that_is_asked_to_stop(time_s, monkeypatch):
    monkeypatch.setattr(JobWatch, "check", lambda self: True)
    with pytest.raises(StoppedEarly, match="Nothing was trained"):
        tuned(config(), SingleProcessCollectives(), time_s)
