"""What is recommended against slow ranks."""

import numpy as np
import pytest

from hvdtrain.commands.doctor.speed import describe
from hvdtrain.config import exclusions
from hvdtrain.config.fields import with_options
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.training.config import StepConfig
from hvdtrain.training.quorum_speedup import estimated_speedup
from hvdtrain.training.stragglers import possible_remedies, remedy

pytestmark = pytest.mark.usefixtures("as_a_command")

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


def held_up(every, seconds):
    """Steps of 0.1 s on four ranks, one of which takes ``seconds`` in each step of ``every``."""
    ready = times(*[0.1] * 4, noise=0.0)
    held_up_steps = np.arange(0, STEPS, every)
    ready[held_up_steps % 4, held_up_steps] = seconds
    return ready


def test_hold_ups_call_for_a_quorum():
    """A hold-up of a millisecond now and then, as of ranks that share cores, does not."""
    found = remedy(held_up(every=13, seconds=1.0))
    assert found["option"] == "--quorum 3"
    assert 1.25 < found["speedup"] < 1.35
    assert remedy(held_up(every=13, seconds=0.3)) is None
    # Two ranks are often held up at the same time.
    assert remedy(held_up(every=3, seconds=1.0))["option"] == "--quorum 2"


@pytest.mark.parametrize(
    ("durations", "quorum", "grace", "speedup"),
    [
        ([[1, 1], [1, 1], [1, 1]], 2, 0.0, 1.0),
        # Four updates of two ranks in four seconds, instead of four of three ranks in seven.
        ([[1, 1, 1, 1], [1, 1, 1, 1], [4, 1, 1, 1]], 2, 0.0, (8 / 4) / (12 / 7)),
        # The third rank is in time for the fourth update, and for the first with a grace period.
        ([[1, 1, 1, 1], [1, 1, 1, 1], [3, 1, 1, 1]], 2, 0.0, (9 / 4) / (12 / 6)),
        ([[1, 1], [1, 1], [1.2, 1]], 2, 0.2, 1.0),
        # The update needs two of them.
        ([[1, 1], [3, 1], [3, 1]], 2, 0.0, 1.0),
        # Needed, but still busy: the second update waits for the third rank's next micro-batch, until 4 + 1.
        ([[1, 1], [1, 9], [4, 1]], 2, 0.0, (4 / 5) / (6 / 13)),
        ([[1, 4], [2, 1], [1, 3]], 3, 0.5, 1.0),
    ],
)
def test_the_speedup_of_a_quorum(durations, quorum, grace, speedup):
    assert estimated_speedup(np.array(durations, float), quorum, grace) == pytest.approx(speedup)


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
    found = possible_remedies(config, ReductionConfig(**reduction), [exclusions.ELASTIC] if elastic else [])
    assert found == possible
    ready = times(1, 1, 1, 4)
    assert (remedy(ready, found) is not None) == ("balance" in possible)


def test_steps_too_short_to_be_measured_need_no_remedy():
    assert remedy(np.zeros((2, 5))) is None


def test_doctor_names_the_slowest_rank():
    line = describe(times(1, 1, 2), ["a", "a", "b"])
    assert line.startswith("slowest rank: 2 on b, 2.00 times the median time; --balance may make 1.6")
    assert describe(times(1, 1, 1), ["a", "a", "b"]).endswith("times the median time")


def test_a_rank_that_is_always_slower_and_sometimes_held_up_gets_the_larger_gain():
    ready = times(1, 1, 1, 4)
    ready[0, ::50] *= 2
    assert remedy(ready)["option"] == "--balance"
