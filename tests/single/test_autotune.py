"""Which settings --autotune takes, with made-up speeds; tests/parallel/test_jobs.py lets it measure."""

import pytest

from hvdtrain.bench import autotune
from hvdtrain.collectives import OneProcess
from hvdtrain.config import TrainConfig
from hvdtrain.errors import StoppedEarly
from hvdtrain.failure import JobWatch


class TwoRanks(OneProcess):
    """The other one takes twice as long."""

    size = 2

    def allgather(self, value):
        return [value, 2 * value]


@pytest.fixture
def time_s(monkeypatch):
    """The time, which only steps let pass."""
    now = [0.0]
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now[0])
    return now


def made_up(now, step_ms, made):
    """Trainers whose step takes as long as the settings say."""

    class Made:
        def __init__(self, config):
            self.seconds = step_ms[config.steps_per_call, config.groups] / 1000
            made.append((config.steps_per_call, config.groups))

        def make_steps(self, steps, clock):
            now[0] += steps * self.seconds

    return Made


def config(**given):
    return TrainConfig(task="digits", given=frozenset(given), **given)


SPEEDS = {(1, None): 2.0, (4, None): 1.5, (16, None): 1.0, (16, 1): 0.8, (1, 1): 1.9, (7, None): 3.0, (7, 1): 3.0}


def tuned(asked, collectives, time_s, speeds=SPEEDS):
    made = []
    chosen, tried = autotune.tune(asked, made_up(time_s, speeds, made), collectives, JobWatch(OneProcess()))
    return chosen, tried, made


def test_the_fastest_is_taken(time_s):
    chosen, tried, _ = tuned(config(), TwoRanks(), time_s)
    assert (chosen.steps_per_call, chosen.groups) == (16, 1)
    # The slower rank's time counts.
    assert [each.step_ms for each in tried] == pytest.approx([4.0, 3.0, 2.0, 2.0, 1.6])
    assert autotune.told(tried, chosen) == (
        "--steps-per-call 16, --groups 1 (a step took with --steps-per-call 1: 4.000 ms; --steps-per-call 4: 3.000 ms; "
        "--steps-per-call 16: 2.000 ms; --groups default: 2.000 ms; --groups 1: 1.600 ms)"
    )


def test_defaults_stay_where_nothing_is_gained(time_s):
    speeds = dict.fromkeys(SPEEDS, 1.0) | {(16, None): 0.99, (1, 1): 0.99}
    chosen, _, _ = tuned(config(), TwoRanks(), time_s, speeds)
    assert (chosen.steps_per_call, chosen.groups) == (1, None)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"steps_per_call": 7}, [(7, None), (7, 1)]),
        ({"groups": 1}, [(1, 1), (4, 1), (16, 1)]),
        # Other groups are other sums.
        ({"deterministic": True}, [(1, None), (4, None), (16, None)]),
        ({"op": "adasum"}, [(1, None), (4, None), (16, None)]),
        ({"mode": "local"}, [(1, None), (4, None), (16, None)]),
        ({"steps_per_call": 7, "deterministic": True}, []),
    ],
)
def test_what_is_not_tried(given, made, time_s):
    speeds = SPEEDS | {(4, 1): 1.0}
    chosen, tried, found = tuned(config(**given), TwoRanks(), time_s, speeds)
    assert found == made
    assert all(getattr(chosen, name) == value for name, value in given.items())
    if not made:
        assert autotune.told(tried, chosen) == "nothing is left to try"


def test_one_rank_has_no_groups(time_s):
    assert tuned(config(), OneProcess(), time_s)[2] == [(1, None), (4, None), (16, None)]


def test_a_job_that_is_asked_to_stop(time_s, monkeypatch):
    monkeypatch.setattr(JobWatch, "check", lambda self: True)
    with pytest.raises(StoppedEarly, match="Nothing was trained"):
        tuned(config(), OneProcess(), time_s)
