"""Invariants of the simulation of failures, and jobs whose goodput can be computed by hand."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_goodput import Outcome, Pauses, at_intervals, at_random, elastic, restarting
from simulated_speed import Setting, Way, speed

from hvdtrain.commands.bench.scaling_model import Link

EQUAL = Setting(4, Link(0.0, 1e15), step_s=0.1, varies=False, num_bytes=0)
"""Ranks that are always equally fast, and send nothing."""
PAUSES = Pauses(lambda living: 0.5, lambda living: 0.25, away_s=3.0, restart_s=5.0)
ELASTIC = {
    "sync": Way(),
    "local": Way(every=8),
    "overlap": Way(every=8, overlap=True),
    "wait-free": Way(8, wait_free=True),
}


def never(now_s: float, living: int) -> float:
    return math.inf


@pytest.mark.parametrize("way", ELASTIC.values(), ids=ELASTIC)
def test_goodput_without_failures_is_one(way: Way):
    outcome = elastic(EQUAL, way, PAUSES, never, 1000.0)
    assert outcome.goodput == pytest.approx(1.0)
    assert (outcome.lost, outcome.failures) == (0.0, 0)


def test_goodput_of_restarts_without_failures_is_one_less_its_checkpoints():
    outcome = restarting(EQUAL, Way(), PAUSES, never, 1000.0, checkpoint_every_s=9.0)
    assert outcome.goodput == pytest.approx(0.9)


@pytest.mark.parametrize("way", ELASTIC.values(), ids=ELASTIC)
def test_every_sample_is_useful_or_lost(way: Way):
    setting = dataclasses.replace(EQUAL, slow=1, varies=True)
    outcome = elastic(setting, way, PAUSES, at_random(200.0, 1), 2000.0)
    assert outcome.failures > 20
    assert 0 < outcome.lost < 0.1 * outcome.computed
    assert outcome.useful + outcome.lost == pytest.approx(outcome.computed)
    assert outcome.computed < outcome.could_living < outcome.could_all


def test_a_failure_costs_its_pauses_the_lost_steps_and_the_absent_rank():
    def once(now_s: float, living: int) -> float:
        return 100.2 if now_s < 100.2 else math.inf

    outcome = elastic(EQUAL, Way(every=8, wait_free=True), PAUSES, once, 200.0)
    # Ranks wait for half of a step more in both pauses; the step of three ranks takes longer.
    first_s, second_s = 0.5 + 0.4 / 3 / 2, 0.25 + 0.4 / 3 / 2
    computed_s = 4 * 100.2 + 3 * (3.0 - first_s) + 4 * (96.8 - second_s)
    assert outcome.computed == pytest.approx(10 * computed_s)
    # Contributed every 0.8 s, last after 100 s.
    assert outcome.lost == pytest.approx(2.0)
    assert outcome.could_living == pytest.approx(10 * (4 * 100.2 + 3 * (3.0 + second_s) + 4 * (96.8 - second_s)))


def test_a_failure_costs_a_restarting_job_all_work_since_the_checkpoint():
    outcome = restarting(EQUAL, Way(), PAUSES, at_intervals(25.0), 99.0, checkpoint_every_s=9.0)
    # In 25 s, one checkpoint is complete, after 10 s; then 5 s are lost, and 20 are left of each interval, of which
    # one checkpoint again, 10 s, is complete.
    assert outcome.failures == 3
    assert outcome.lost == pytest.approx(0.9 * 40 * (15 + 10 + 10))
    assert outcome.computed == pytest.approx(0.9 * 40 * (25 + 20 + 20 + 19))


def test_failures_while_a_job_restarts_restart_it_again():
    def hasty(now_s: float, ranks: int) -> float:
        return now_s + 4.0

    outcome = restarting(
        EQUAL, Way(), PAUSES, lambda now, ranks: hasty(now, ranks) if now < 40 else math.inf, 100.0, 9.0
    )
    assert outcome.failures == 10
    assert outcome.useful == pytest.approx(0.9 * 40 * 55)


def test_the_same_seed_gives_the_same_result():
    def simulated(seed: int) -> Outcome:
        return elastic(EQUAL, Way(every=8), PAUSES, at_random(200.0, seed), 500.0)

    assert simulated(1) == simulated(1) != simulated(2)


def test_only_ways_that_wait_are_held_up_by_a_slow_rank():
    setting = dataclasses.replace(EQUAL, slow=1)
    assert speed(setting, Way(), 4).share == pytest.approx(2 / 3.5)
    assert speed(setting, Way(every=8), 4).share == pytest.approx(2 / 3.5)
    assert speed(setting, Way(every=8, wait_free=True), 4).share == 1.0
    # Three ranks contribute to an update, a quarter of a step later. All wait for the slow one after 16 updates.
    assert speed(setting, Way(quorum_share=0.75), 4).share == pytest.approx(3 / 0.125 / 35, rel=0.05)
