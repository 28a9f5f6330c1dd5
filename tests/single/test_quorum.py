"""Backup workers: when an update closes, who has which samples, and how they are read and recorded."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import make_trainer, train_config

import hvdtrain
from hvdtrain.checkpoint import plain_values
from hvdtrain.data import Arrays
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.closing import ClosingRule, OpenUpdate, Ready
from hvdtrain.training.config import QuorumConfig
from hvdtrain.training.quorum.contributions import read_contributions
from hvdtrain.training.quorum.feed import QuorumFeed
from hvdtrain.training.quorum.ledger import QuorumLedger
from hvdtrain.training.quorum.shares import EpochShares
from hvdtrain.training.record_file import RecordFile

hvdtrain.init()


def ledger_of(num_samples=203, batch_size=8, size=4, quorum=3, remainder="pad", **options) -> QuorumLedger:
    plan = SamplePlan(num_samples=num_samples, batch_size=batch_size, size=size, remainder=remainder)
    return QuorumLedger(plan, QuorumConfig(quorum=quorum, **options))


def positions(shares: EpochShares, ranks) -> np.ndarray:
    found = [shares.next_of(rank) for rank in ranks]
    return np.concatenate([shares.positions_of(rank, each.index) for rank, each in zip(ranks, found, strict=True)])


def contributors_of(ledger: QuorumLedger, slow: set[int], generator) -> tuple[int, ...]:
    """Who contributes if the slow ranks are seldom ready, by the rule of the ledger."""
    rule = ledger.rule()
    ready: dict[int, Ready] = {}
    while rule.closes_s(ready, ready) is None:
        rank = int(generator.choice([r for r in rule.active if r not in ready]))
        if rank not in slow or generator.random() < 0.05:
            ready[rank] = Ready(0.0, 0.0)
    return rule.contributors(ready)


def closing(ledger: QuorumLedger, ready: set[int]) -> tuple[int, ...] | None:
    """The contributors of the next update if it closes with these."""
    rule, made = ledger.rule(), dict.fromkeys(ready, Ready(0.0, 0.0))
    return None if rule.closes_s(ready, made) is None else rule.contributors(ready)


@settings(deadline=None)  # of the time of an example, on a busy machine
@given(
    size=st.integers(1, 5),
    num_samples=st.integers(5, 160),
    batch_size=st.integers(1, 7),
    quorum=st.integers(1, 5),
    remainder=st.sampled_from(["pad", "drop"]),
    slow=st.sets(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 9),
)
def test_every_sample_once_an_epoch_whoever_is_late(size, num_samples, batch_size, quorum, remainder, slow, seed):
    if remainder == "drop" and num_samples < size * batch_size:
        num_samples = size * batch_size
    ledger = ledger_of(num_samples, batch_size, size, min(quorum, size), remainder, max_missed_updates=3)
    generator = np.random.default_rng(seed)
    steps_per_epoch = ledger.shares.plan.steps_per_epoch
    drawn: list[np.ndarray] = []
    while (epoch := ledger.shares.epoch) < 2:
        step = ledger.step
        contributors = contributors_of(ledger, slow, generator)
        drawn.append(positions(ledger.shares, contributors))
        weight = ledger.batch_weight(contributors)
        ledger.record(contributors)
        assert weight * batch_size == pytest.approx(len(drawn[-1]))
        assert max(ledger.missed_in_a_row) <= 3
        # So that whatever is due at a step is not missed.
        assert ledger.step - step in (0, 1)
        if ledger.shares.epoch != epoch:
            assert ledger.step == (epoch + 1) * steps_per_epoch
            expected = min(num_samples, steps_per_epoch * size * batch_size)
            assert sorted(np.concatenate(drawn)) == list(range(expected))
            drawn.clear()


def test_without_stragglers_the_steps_are_those_of_sync_mode():
    ledger = ledger_of()
    plan = ledger.shares.plan
    for step in range(plan.steps_per_epoch):
        ranks = closing(ledger, {0, 1, 2, 3})
        expected = [dataclasses.replace(plan, rank=rank).slices(step)[0] for rank in ranks]
        found = positions(ledger.shares, ranks)
        assert found.tolist() == [i for part in expected for i in range(part.start, part.start + part.count)]
        ledger.record(ranks)
        assert ledger.step == step + 1
    assert ledger.updates == plan.steps_per_epoch
    assert ledger.shares.deal == 0


def test_the_rest_of_an_epoch_is_dealt_by_speed():
    ledger = ledger_of(num_samples=20 * 32, max_missed_updates=100)
    for _ in range(19):
        ledger.record((0, 1, 2))
    assert ledger.shares.deal == 0
    ledger.record((0, 1, 2))
    shares = ledger.shares
    assert shares.deal == 1
    assert shares.rest().tolist() == [p for step in range(20) for p in range(32 * step + 24, 32 * step + 32)]
    # 160 samples, in proportion to 21, 21, 21 and 1.
    assert shares.sizes == [53, 53, 52, 2]
    assert shares.num_left() == [7, 7, 7, 1]
    assert not ledger.rule().required


def test_the_last_step_of_an_epoch_waits_for_all_who_have_samples():
    ledger = ledger_of(num_samples=2 * 32 + 3)
    for _ in range(2):
        assert ledger.rule().quorum == 3
        ledger.record((0, 1, 2, 3))
    rule = ledger.rule()
    assert (rule.quorum, tuple(rule.required)) == (3, (1, 2, 3))
    ledger.record((1, 2, 3))
    assert (ledger.shares.epoch, ledger.step) == (1, 3)


def test_a_rank_that_missed_too_many_updates_is_waited_for():
    ledger = ledger_of(max_missed_updates=2)
    ledger.record((0, 1, 2))
    assert closing(ledger, {0, 1, 2}) == (0, 1, 2)
    ledger.record((0, 1, 2))
    assert closing(ledger, {0, 1, 2}) is None
    assert closing(ledger, {0, 3}) is None
    assert closing(ledger, {0, 1, 3}) == (0, 1, 3)
    ledger.record((0, 1, 3))
    assert ledger.missed == [0, 0, 1, 2]
    assert not ledger.rule().required


def test_a_deadline_closes_with_whoever_is_ready():
    rule = ClosingRule(active=[0, 1, 2], quorum=2, deadline_s=0.5)
    computing = {0, 1, 2}
    assert rule.closes_s(computing, {}) is None
    assert rule.closes_s(computing, {1: Ready(7.0, 7.2)}) == 7.5
    assert rule.closes_s(computing, {1: Ready(7.0, 7.9)}) == 7.9
    assert rule.closes_s({*computing, 3}, {3: Ready(7.0, 7.2)}) is None
    made = {2: Ready(7.0, 7.3), 0: Ready(7.1, 7.2)}
    assert rule.closes_s(computing, made) == 7.3
    assert rule.contributors({*made, 3}) == (0, 2)


def test_ranks_that_still_compute_get_a_grace():
    rule = ClosingRule(active=[0, 1, 2, 3], quorum=2, grace=0.1)
    made = {0: Ready(5.0, 7.0)}
    assert rule.closes_s({0, 1, 2}, made) is None
    # The second one was ready after 3 s. The last one does not compute for this update, and is not waited for.
    made[1] = Ready(5.5, 8.0)
    assert rule.closes_s({0, 1, 2}, made) == pytest.approx(8.3)
    assert rule.closes_s({0, 1}, made) == 8.0
    made[2] = Ready(6.0, 8.2)
    assert rule.closes_s({0, 1, 2}, made) == 8.2
    assert rule.closes_s({0, 1, 2, 3}, made) == pytest.approx(8.3)


def test_the_open_update_ignores_micro_batches_of_closed_ones():
    rule = ClosingRule(active=[0, 1, 2], quorum=2, deadline_s=3.0, grace=1.0)
    update = OpenUpdate([0, 1], 5)
    assert update.close(0.0) is None
    assert update.seconds_left(0.0) is None
    update.ready(2, 4, rule, 0.5, 1.0)
    update.begin(2, 4)
    assert update.seconds_left(1.0) is None
    update.ready(0, 5, rule, 1.0, 2.5)
    assert update.close(2.5) is None
    assert update.seconds_left(2.5) == 2.0
    update.ready(1, 5, rule, 1.0, 3.0)
    assert update.close(3.0) == (0, 1)
    assert update.number == 6
    assert update.close(99.0) is None
    update.ready(2, 6, rule, 0.5, 99.5)
    assert update.close(101.9) is None
    assert update.close(102.0) == (2,)


def test_contributors_compute_for_the_next_update_at_once_and_late_ranks_when_they_say_so():
    rule = ClosingRule(active=[0, 1, 2], quorum=2, grace=1.0)
    update = OpenUpdate([0, 1, 2])
    update.ready(0, 0, rule, 1.0, 1.0)
    update.ready(1, 0, rule, 1.0, 1.0)
    assert update.close(1.9) is None
    assert update.close(2.0) == (0, 1)
    # Rank 2 still computes for the update that it has missed, and is not waited for.
    update.ready(0, 1, rule, 1.0, 3.0)
    assert update.close(3.0) is None
    update.ready(1, 1, rule, 1.0, 3.0)
    assert update.close(3.0) == (0, 1)
    update.begin(2, 2)
    update.ready(0, 2, rule, 1.0, 4.0)
    update.ready(1, 2, rule, 1.0, 4.0)
    assert update.close(4.9) is None
    update.ready(2, 2, rule, 0.9, 4.9)
    assert update.close(4.9) == (0, 1, 2)
    update.ready(0, 3, rule, 1.0, 6.0)
    update.ready(1, 3, rule, 1.0, 6.0)
    assert update.close(6.9) is None
    assert update.close(7.0) == (0, 1)


@pytest.mark.parametrize("new_size", [4, 2])
@pytest.mark.parametrize("updates", [10, 24])
def test_a_checkpoint_keeps_what_is_left(new_size, updates):
    ledger = ledger_of(num_samples=20 * 32 + 9)
    for _ in range(updates):
        ledger.record((0, 1, 2) if ledger.updates % 5 else (0, 1, 2, 3))
    arrays: dict[str, np.ndarray] = {}
    kept = plain_values.join(plain_values.split(ledger.state(), arrays, "state"), arrays)
    restored = ledger_of(num_samples=20 * 32 + 9, size=new_size, batch_size=32 // new_size, quorum=2)
    restored.restore(kept)
    assert (restored.step, restored.updates, restored.samples) == (ledger.step, updates, ledger.samples)
    assert restored.shares.rest().tolist() == ledger.shares.rest().tolist()
    assert (ledger.shares.deal > 0) == (updates == 24)
    if new_size == 4:
        assert ledger.shares.state()["next"] != [0] * 4
        for rank in range(4):
            assert restored.shares.next_of(rank) == ledger.shares.next_of(rank)
        assert restored.missed == ledger.missed


def test_a_late_micro_batch_is_kept_and_the_rest_is_read_by_number():
    numbers = np.arange(100)
    plan = SamplePlan(num_samples=100, batch_size=5, rank=1, size=2, seed=3)
    ledger = QuorumLedger(plan, QuorumConfig(quorum=1))
    feed = QuorumFeed(Arrays(numbers, numbers), plan, BadSampleQuota(0, SingleProcessCollectives()))
    read, iterators = [], set()
    while ledger.shares.epoch < 2:
        shares = ledger.shares
        if (batch := shares.next_of(1)) is not None:
            x, _ = feed.batch(shares, batch)
            assert feed.batch(shares, batch)[0] is x
            assert x.numpy().tolist() == plan.order(shares.epoch)[shares.positions_of(1, batch.index)].tolist()
        iterators.add(id(feed.iterator))
        # In the first epoch this rank misses each third update.
        contributors = (0,) if shares.epoch == 0 and ledger.updates % 3 == 0 else (0, 1)
        active = [rank for rank, left in enumerate(shares.num_left()) if left]
        contributors = tuple(rank for rank in contributors if rank in active) or tuple(active)
        read += [x] if 1 in contributors else []
        ledger.record(contributors)
    # Not a new one for each micro-batch.
    assert len(iterators) <= 5
    assert len(np.unique(np.concatenate(read[:5]))) == 25


def test_contributions_are_recorded_and_continued(tmp_path):
    path = str(tmp_path / "a" / "contributions.jsonl")
    file = RecordFile(path, 3, "updates")
    file.start(0)
    for each in ((0, 1), (2,), (0, 1, 2)):
        file.add(each)
    file.close()
    assert read_contributions(path, 3) == [(0, 1), (2,), (0, 1, 2)]
    again = RecordFile(path, 3, "updates")
    again.start(2)
    again.add((1,))
    again.close()
    assert read_contributions(path, 3) == [(0, 1), (2,), (1,)]
    with pytest.raises(UsageError, match=r"3 updates of 7"):
        RecordFile(path, 3, "updates").start(7)
    with pytest.raises(UsageError, match=r"the recorded number of ranks\. Received: .*, of 3 ranks, on 2\."):
        read_contributions(path, 2)
    for line in ("[0, 3]", "[1, 1]", "[1, 0]", "[true]", "[1.0]", "[]"):
        (tmp_path / "other").write_text(f'{{"ranks": 3}}\n{line}\n')
        with pytest.raises(UsageError, match="ranks below 3, in order and each once"):
            read_contributions(str(tmp_path / "other"), 3)
    (tmp_path / "other").write_text("[0, 3]\n")
    with pytest.raises(UsageError, match="that record wrote"):
        read_contributions(str(tmp_path / "other"), 3)


def test_a_record_that_cannot_be_written_ends_and_training_continues(capfd):
    file = RecordFile("/dev/full", 2, "updates")
    file.start(0)
    file.add((0, 1))
    file.flush()
    file.add((0, 1))
    file.flush()
    file.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "record must be a file that can be written. Received: /dev/full (No space left on device)." in lines[0]


def test_a_killed_run_leaves_the_contributions_up_to_its_checkpoint(tmp_path):
    path = tmp_path / "contributions.jsonl"
    file = RecordFile(str(path), 2, "updates")
    file.start(0)
    for _ in range(3):
        file.add((0, 1))
    file.flush()
    # What is buffered is written in blocks, which do not end with a line.
    with path.open("a") as block:
        block.write("[0,")
    assert read_contributions(str(path), 2) == [(0, 1)] * 3
    resumed = RecordFile(str(path), 2, "updates")
    resumed.start(2)
    resumed.add((1,))
    # Killed before it has saved anything: nothing was flushed.
    assert read_contributions(str(path), 2) == [(0, 1)] * 2
    RecordFile(str(path), 2, "updates").start(2)


def test_a_replay_of_another_run_is_refused():
    ledger = ledger_of()
    ledger.replay([(0, 1, 2), (0, 1, 3)])
    assert ledger.rule() == ClosingRule.exactly((0, 1, 2))
    assert closing(ledger, {0, 1, 2, 3}) == (0, 1, 2)
    ledger.record((0, 1, 2))
    ledger.record((0, 1, 3))
    with pytest.raises(UsageError, match=r"Received: ranks \[\] for update 3, of 2 in the file"):
        ledger.rule()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 0}, "quorum must be at least 1"),
        ({"step_deadline": 1.0}, "step_deadline needs quorum"),
        ({"replay": "file"}, "replay needs quorum"),
        ({"quorum": 2, "step_grace": -0.1}, "step_grace must be from 0 to 10"),
        ({"quorum": 2, "step_deadline": 0.0}, "step_deadline must be a finite number above 0"),
        ({"quorum": 2, "max_missed_updates": 0}, "max_missed_updates must be at least 1"),
        ({"quorum": 2, "mode": "local"}, "quorum excludes mode='local'"),
        ({"quorum": 2, "gradient_accumulation_steps": 2}, "quorum excludes gradient_accumulation_steps"),
        ({"quorum": 2, "steps_per_execution": 2}, "quorum excludes steps_per_execution"),
        ({"quorum": 2, "sync_batchnorm": True}, "quorum excludes sync_batchnorm=True"),
        ({"quorum": 2, "balance": True}, "quorum excludes balance=True"),
        ({"quorum": 2, "bad_samples": 1}, "quorum excludes bad_samples"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        train_config(**options)


def test_the_update_is_compiled_before_the_first_micro_batch():
    """Otherwise the other ranks would wait for it during the first update."""
    events: list[str] = []

    class TracedOptimizer(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            events.append("compiled")
            super().apply(grads, trainable_variables)

    class Observed(keras.layers.Layer):
        def call(self, x, training=False):
            def compute(rows):
                events.append("micro-batch")
                return rows

            return tf.ensure_shape(tf.numpy_function(compute, [x], x.dtype), x.shape) if training else x

    model = keras.Sequential([keras.layers.Input((3,)), Observed(), keras.layers.Dense(1)])
    model.compile(TracedOptimizer(0.1), "mse", jit_compile=False)
    source = Arrays(np.ones((12, 3), np.float32), np.ones((12, 1), np.float32))
    make_trainer(model, source, batch_size=4, steps=3, quorum=1).fit()
    assert events == ["compiled", *["micro-batch"] * 3]
