"""What is recommended against slow ranks."""

import numpy as np
import pytest

from hvdtrain.commands.doctor.speed import describe
from hvdtrain.config.fields import with_options
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.training.config import StepConfig
from hvdtrain.training.stragglers import possible_remedies, remedy

STEPS = 400


def times(*seconds, noise=0.02):
    generator = np.random.default_rng(0)
    return np.array(seconds)[:, None] * (1 + noise * generator.random((len(seconds), STEPS)))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_ranks_need_no_remedy(ranks, noise):
    assert remedy(times(*[0.1] * ranks, noise=noise)) is None


@pytest.mark.parametrize(("seconds", "speedup"), [((1, 1, 1, 2), 1.75), ((1, 1, 1, 4), 3.25), ((3, 1), 2.0)])
def test_ranks_that_are_always_slower_get_smaller_parts(seconds, speedup):
    assert remedy(times(*seconds)) == {"option": "--balance", "speedup": pytest.approx(speedup, rel=0.03)}


def test_hold_ups_call_for_a_quorum():
    """In one step of ten, one of four ranks takes ten times as long; a step then closes a quarter later.

    A hold-up of a millisecond now and then, as of ranks that share cores, does not.
    """
    ready = times(*[0.1] * 4, noise=0.0)
    ready[np.arange(STEPS) % 4, np.arange(STEPS)] *= np.where(np.arange(STEPS) % 10 == 0, 10, 1)
    speedup = (0.9 + 0.1 * 10) / (0.9 + 0.1 * 1.25) * (1 - 0.1 / 4)
    assert remedy(ready) == {"option": "--quorum 3", "speedup": pytest.approx(speedup)}
    ready = times(*[0.1] * 4, noise=0.0)
    ready[np.arange(STEPS) % 4, np.arange(STEPS)] *= np.where(np.arange(STEPS) % 10 == 0, 4, 1)
    assert remedy(ready) is None


@pytest.mark.parametrize(
    ("options", "reduction", "elastic", "possible"),
    [
        ({}, {}, False, ["balance", "quorum"]),
        ({}, {}, True, ["balance"]),
        ({"jit_compile": True}, {}, False, ["quorum"]),
        ({"sync_batchnorm": True}, {}, False, ["balance"]),
        ({}, {"compression": "fp16"}, False, ["balance"]),
        ({}, {"op": "adasum"}, False, []),
        ({"balance": True}, {}, False, []),
        ({"mode": "local"}, {}, False, []),
    ],
)
def test_only_what_other_options_allow_is_recommended(options, reduction, elastic, possible):
    config = with_options(StepConfig(), options)
    found = possible_remedies(config, ReductionConfig(**reduction), ranks_may_change=elastic)
    assert found == possible
    ready = times(1, 1, 1, 4)
    assert (remedy(ready, found) is not None) == ("balance" in possible)


def test_doctor_names_the_slowest_rank():
    line = describe(times(1, 1, 2), ["a", "a", "b"])
    assert line.startswith("slowest rank: 2 on b, 2.00 times the median time; --balance may make 1.6")
    assert describe(times(1, 1, 1), ["a", "a", "b"]).endswith("times the median time")


def test_a_rank_that_is_always_slower_and_sometimes_held_up_gets_the_larger_gain():
    ready = times(1, 1, 1, 4)
    ready[0, ::50] *= 2
    assert remedy(ready)["option"] == "--balance"
