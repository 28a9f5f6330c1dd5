"""Predictions with known answers; benchmarks/prediction.py compares predictions with measurements."""

import dataclasses
import math

import numpy as np
import pytest

from hvdtrain.commands import cli
from hvdtrain.commands.bench import fragment_choice, prediction, scaling_model
from hvdtrain.commands.bench.scaling_model import Averaging, Cluster, Link, MeasuredStep
from hvdtrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("as_a_command")

NETWORK, WITHIN = Link(1e-3, 1e8), Link(1e-5, 1e10)
STEADY = MeasuredStep(np.full(50, 0.1), [(1_000_000, 0.5), (3_000_000, 1.0)])


def cluster(hosts: int, ranks_per_host: int = 1) -> Cluster:
    return Cluster(hosts, ranks_per_host, NETWORK, WITHIN)


def test_cost_of_an_allreduce():
    assert scaling_model.ring_s(4_000_000, 4, NETWORK) == pytest.approx(6 * 1e-3 + 1.5 * 0.32)
    # Small messages use recursive doubling.
    assert scaling_model.allreduce_s(4, cluster(8)) == pytest.approx(3e-3, rel=1e-3)
    by_rings = dataclasses.replace(cluster(8), small_bytes=0)
    assert scaling_model.allreduce_s(4, by_rings) == pytest.approx(14e-3, rel=1e-3)
    assert scaling_model.allreduce_s(4_000_000, cluster(1)) == 0
    assert scaling_model.allreduce_s(4_000_000, cluster(1, 4)) == pytest.approx(6e-5 + 1.5 * 0.0032)


def test_hierarchical_allreduce_reduces_latency():
    flat = scaling_model.allreduce_s(4_000_000, cluster(16, 8))
    assert flat == pytest.approx(254 * 1e-3 + 2 * 127 / 128 * 0.32)
    hierarchical = scaling_model.allreduce_s(4_000_000, cluster(16, 8), hierarchical=True)
    assert hierarchical == pytest.approx(30 * 1e-3 + 2 * 15 / 16 * 0.32 + 14 * 1e-5 + 1.75 * 0.0032)


def test_reduction_overlaps_with_backpropagation():
    # Ready after 50 and 100 ms; 1 and 3 MB take 82 and 242 ms on two hosts.
    predicted = scaling_model.sync_step(STEADY, cluster(2))
    assert predicted.step_s == pytest.approx(0.05 + 0.082 + 0.242)
    assert predicted.compute_s == pytest.approx(0.1)
    assert predicted.waiting_s == pytest.approx(0, abs=1e-9)
    assert predicted.communication_s == pytest.approx(0.274)
    assert predicted.efficiency == pytest.approx(0.1 / 0.374)
    one = scaling_model.sync_step(STEADY, cluster(1))
    assert (one.step_s, one.efficiency) == (pytest.approx(0.1), pytest.approx(1))


def test_waiting_buckets_are_fused_up_to_a_size():
    calls = []

    def reduce_s(size: int) -> float:
        calls.append(size)
        return 1.0

    messages = [(10, 0.1), (20, 0.2), (30, 0.3), (scaling_model.FUSION_BYTES, 0.4)]
    assert scaling_model.communication_end_s(messages, 1.0, reduce_s) == pytest.approx(3.1)
    assert calls == [10, 50, scaling_model.FUSION_BYTES]


def test_expected_time_of_the_slowest_rank():
    rng = np.random.default_rng(0)
    seconds = 0.1 + rng.exponential(0.01, 5000)
    for ranks in (1, 2, 16, 1024):
        harmonic = sum(1 / i for i in range(1, ranks + 1))
        assert scaling_model.slowest_s(seconds, ranks) == pytest.approx(0.1 + 0.01 * harmonic, rel=0.03)
    assert scaling_model.slowest_s(np.full(10, 0.2), 4096) == pytest.approx(0.2)


@pytest.mark.parametrize("ranks", [1, 16, 64, 256, 1024, 4096])
def test_the_slowest_rank_if_few_steps_take_much_longer(ranks):
    rng = np.random.default_rng(0)

    def seconds(*shape):
        return rng.normal(0.2, 0.006, shape) * np.where(rng.random(shape) < 0.01, 1.5, 1)

    expected = np.mean(seconds(400, ranks).max(axis=1))
    assert scaling_model.slowest_s(seconds(4000), ranks) == pytest.approx(expected, rel=0.04)


def test_local_training_communicates_once_per_round():
    reduce_s = 2e-3 + 0.32
    predicted = scaling_model.local_step(STEADY, cluster(2), Averaging(8))
    assert predicted.step_s == pytest.approx(0.1 + reduce_s / 8)
    assert scaling_model.local_step(STEADY, cluster(2), Averaging(8, overlap=True)).step_s == pytest.approx(0.1)
    assert scaling_model.local_step(STEADY, cluster(2), Averaging(2, overlap=True)).step_s == pytest.approx(
        0.1 + (reduce_s - 0.2) / 2
    )
    # If step times vary, ranks wait less for each other the longer a round is.
    uneven = MeasuredStep(np.random.default_rng(1).uniform(0.05, 0.15, 1000), STEADY.messages)
    waits = [scaling_model.local_step(uneven, cluster(64), Averaging(every)).waiting_s for every in (1, 4, 64)]
    assert waits[0] > 1.3 * waits[1] > 4 * waits[2] > 0


def test_fragments_are_hidden_one_at_a_time():
    """4 MB in 322 ms, a quarter of them in 82 ms, with steps of 100 ms."""

    def exposed_s(*args, **options):
        predicted = scaling_model.local_step(STEADY, cluster(2), Averaging(*args, **options))
        return predicted.step_s - 0.1

    assert exposed_s(8, fragments=4) == pytest.approx(0.082 / 2)
    assert exposed_s(4, fragments=4, overlap=True) == pytest.approx(0, abs=1e-9)
    assert exposed_s(16, fragments=2, overlap=True, delay=1) == pytest.approx((0.162 - 0.1) / 8)
    # An average takes longer than the steps between two: a long delay hides no more.
    assert exposed_s(2, fragments=2, overlap=True, delay=2) == pytest.approx(0.162 - 0.1)


def test_the_choice_of_interval_and_fragments():
    found = fragment_choice.choose(STEADY, cluster(2), max_fragments=9)
    # 322 ms in half of 8 steps of 100 ms, and each eighth, of 42 ms, in half of one.
    assert (found.every, found.fragments, found.delay) == (8, 8, 1)
    assert found.average_steps == pytest.approx(0.42)
    assert found.predicted.step_s == pytest.approx(0.1)
    # Of few layers.
    found = fragment_choice.choose(STEADY, cluster(2), max_fragments=3)
    assert (found.every, found.fragments, found.delay) == (8, 2, 4)
    # Two messages of 0.2 s: fragments would take as long as the whole.
    far = Cluster(2, 1, Link(0.2, 1e10), WITHIN)
    found = fragment_choice.choose(STEADY, far, max_fragments=9)
    assert (found.every, found.fragments, found.delay) == (16, 1, 9)
    assert fragment_choice.choose(STEADY, Cluster(2, 1, Link(60.0, 1e5), WITHIN), max_fragments=9) is None


def test_local_training_across_hosts_averages_gradients_within_them():
    # On a host of 8, buckets of 1 and 3 MB are ready after 50 and 100 ms; only the second one's reduction is exposed.
    within_s = 14 * 1e-5 + 1.75 * 0.0024
    reduce_s = scaling_model.allreduce_s(4_000_000, cluster(16, 8), hierarchical=True)
    predicted = scaling_model.local_across_hosts_step(STEADY, cluster(16, 8), Averaging(8), hierarchical=True)
    assert predicted.step_s == pytest.approx(0.1 + within_s + reduce_s / 8)
    overlapped = scaling_model.local_across_hosts_step(
        STEADY, cluster(16, 8), Averaging(8, overlap=True), hierarchical=True
    )
    assert overlapped.step_s == pytest.approx(0.1 + within_s)
    # The ranks of a host wait for each other at every step, hosts for each other at each average.
    uneven = MeasuredStep(np.random.default_rng(1).uniform(0.05, 0.15, 1000), [])
    waits_s = {
        "local": scaling_model.local_step(uneven, cluster(16, 8), Averaging(64)).waiting_s,
        "across hosts": scaling_model.local_across_hosts_step(uneven, cluster(16, 8), Averaging(64)).waiting_s,
        "sync": scaling_model.sync_step(uneven, cluster(16, 8)).waiting_s,
    }
    # The mean of the largest of 8 uniform numbers is 8/9 of their range.
    assert waits_s["across hosts"] == pytest.approx((8 / 9 - 1 / 2) * 0.1, rel=0.1)
    assert waits_s["local"] < 0.5 * waits_s["across hosts"] < 0.5 * waits_s["sync"]


def test_goodput():
    options = {"checkpoint_every_s": 900.0, "checkpoint_s": 100.0, "restart_s": 50.0}
    assert scaling_model.goodput(100, rank_mtbf_s=1e6, **options) == pytest.approx(0.9 * (1 - 500 * 100 / 1e6))
    assert scaling_model.goodput(10**6, rank_mtbf_s=1e6, **options) == 0
    assert scaling_model.goodput(1, rank_mtbf_s=math.inf, **options) == pytest.approx(0.9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fit_recovers_the_link(ranks):
    link = Link(2e-4, 9.4e8)
    measured = [(4, scaling_model.doubling_s(4, ranks, link))]
    measured += [(size, scaling_model.ring_s(size, ranks, link)) for size in (64 << 10, 1 << 20, 16 << 20)]
    found = scaling_model.fit_link(measured, ranks)
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bits_per_second == pytest.approx(9.4e8)


def asked(*more: str):
    return cli.parse("bench", ["--predict", "2,64", "--sync-every", "8", *more])


def measured(ranks: int, hosts: int) -> dict:
    rows = [{"bytes": size, "seconds": scaling_model.around_s(size, ranks, NETWORK)} for size in (4, 1 << 16, 1 << 24)]
    return {"ranks": ranks, "hosts": hosts, "network": {"allreduce": rows}}


def test_predictions_of_a_job():
    """From two hosts to 64 ranks on 64 hosts; then with explicit ranks per host and links."""
    steps = (list(STEADY.seconds), list(STEADY.messages))
    predicted = prediction.predict(asked(), measured(2, 2), *steps, max_fragments=9)
    rows = {(row["ranks"], row["mode"]): row for row in predicted["rows"]}
    assert rows.keys() == {(2, "sync"), (2, "local"), (64, "sync"), (64, "local")}
    assert rows[2, "sync"]["step_ms"] == pytest.approx(374, rel=1e-3)
    assert rows[64, "sync"]["hosts"] == 64
    expected = scaling_model.sync_step(STEADY, cluster(64))
    assert rows[64, "sync"]["step_ms"] == pytest.approx(1000 * expected.step_s, rel=1e-3)
    fractions = ("compute_fraction", "waiting_fraction", "communication_fraction")
    assert all(sum(row[name] for name in fractions) == pytest.approx(1) for row in predicted["rows"])
    assert all(row["goodput"] is None for row in predicted["rows"])
    assert prediction.table(predicted).startswith("predicted, not measured:")
    proposed = {each["ranks"]: each for each in predicted["proposals"]}
    assert (proposed[2]["sync_every"], proposed[2]["fragments"], proposed[2]["fragment_delay"]) == (8, 8, 1)
    line = next(line for line in prediction.table(predicted).splitlines() if line.startswith("2 ranks:"))
    assert "--mode local --sync-every 8 --fragments 8 --overlap --fragment-delay 1" in line
    assert "100.0 ms a step instead of 374.0" in line

    within = ["--within-mbit", "10000", "--within-latency-ms", "0.01"]
    options = ["--ranks-per-host", "8", *within, "--rank-mtbf-hours", "1000"]
    predicted = prediction.predict(asked(*options), measured(2, 2), list(STEADY.seconds), list(STEADY.messages))
    rows = {(row["ranks"], row["mode"], row["allreduce"]): row for row in predicted["rows"]}
    assert rows[64, "sync", "flat"]["hosts"] == 8
    assert rows[64, "sync", "hierarchical"]["step_ms"] < rows[64, "sync", "flat"]["step_ms"]
    assert rows[64, "local", "flat"]["step_ms"] < rows[64, "local across hosts", "flat"]["step_ms"]
    assert (2, "sync", "hierarchical") not in rows, "one host"
    assert (2, "local across hosts", "flat") not in rows, "one host"
    assert 0.8 < rows[64, "local", "flat"]["goodput"] < rows[2, "local", "flat"]["goodput"] < 1
    assert "hierarchical" in prediction.table(predicted)


def test_unknown_link_is_an_error():
    steps = (list(STEADY.seconds), list(STEADY.messages))
    with pytest.raises(UsageError, match=r"--predict 2 needs the link between hosts, which 1 rank\(s\) on 1"):
        prediction.require_links(asked("--ranks-per-host", "1").prediction, ranks=1, hosts=1)
    with pytest.raises(UsageError, match=r"--predict 64 needs the link between hosts, which 2 rank\(s\) on 1"):
        prediction.require_links(asked().prediction, ranks=2, hosts=1)
    with pytest.raises(UsageError, match=r"--predict 2 needs the link within hosts, which 4 rank\(s\) on 2"):
        prediction.require_links(asked().prediction, ranks=4, hosts=2)
    prediction.require_links(asked().prediction, ranks=2, hosts=2)
    link = ["--link-mbit", "100", "--link-latency-ms", "1"]
    prediction.require_links(asked(*link, "--ranks-per-host", "1").prediction, ranks=1, hosts=1)
    predicted = prediction.predict(asked(*link, "--ranks-per-host", "1"), {"ranks": 1, "hosts": 1}, *steps)
    assert predicted["rows"][0]["step_ms"] == pytest.approx(374)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predict", "8,x"], "--predict must be numbers of ranks"),
        (["--link-mbit", "100"], "--link-mbit needs --link-latency-ms"),
        (["--ranks-per-host", "0"], "--ranks-per-host must be at least 1"),
    ],
)
def test_invalid_options_are_rejected(arguments, message):
    with pytest.raises(UsageError, match=message):
        cli.parse("bench", arguments)
