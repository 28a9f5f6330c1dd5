"""On all ranks: rounds of local SGD that end by a rule while no rank waits for another."""

import hashlib
import json
import time

import keras
import numpy as np
import pytest
from cases_fragments import division_of, move_of, plain_model
from models import relative_difference, values
from stopped_runs import StopAt, make_run, stopped
from trainings import COLLECTIVES, RANK, SIZE

from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd.averager import OwnRound
from hvdtrain.local_sgd.fragment import Fragment
from hvdtrain.local_sgd.round_agreement import RoundAgreement
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.training.train_step import TrainStep

# Ranks' steps differ in length by these factors.
SPEEDS = [2.5 if rank == SIZE - 1 else 1.0 for rank in range(SIZE)]
STEP_S = 0.004


@pytest.fixture
def anchors(monkeypatch) -> list[str]:
    """The digest of the anchor after each average that this rank merges."""
    merge, digests = Fragment.merge, []

    def merge_and_note(self):
        facts = merge(self)
        digests.append(hashlib.sha256(b"".join(each.numpy().tobytes() for each in self._anchor)).hexdigest())
        return facts

    monkeypatch.setattr(Fragment, "merge", merge_and_note)
    return digests


def assert_equal_in_each_round(anchors: list[str], more_than: int) -> None:
    everyone = COLLECTIVES.allgather(anchors)
    assert everyone == [anchors] * SIZE
    # Each average has moved the anchor, except those at the end that nothing was contributed to.
    assert len(set(anchors)) >= more_than


def slow_steps(monkeypatch, factor: float) -> None:
    run = TrainStep.run

    def run_slowly(self, steps):
        time.sleep(steps * STEP_S * factor)
        run(self, steps)

    monkeypatch.setattr(TrainStep, "run", run_slowly)


def by_hand(initial, divisions, move, rounds: list[list[OwnRound]], made: list[int]):
    """The weights if the steps of each round, and no others, are averaged in it with the weight of their samples."""
    weights, count = [each.astype(np.float64) for each in initial], len(divisions)
    done = [0] * SIZE
    sent = [[0] * SIZE for _ in divisions]
    final = [[OwnRound(made[rank] - sum(each.steps for each in rounds[rank]), 0) for rank in range(SIZE)]]
    nothing = [[OwnRound(0, 0)] * SIZE] * (count - 1)
    for number, ranks in enumerate([*zip(*rounds, strict=True), *final, *nothing]):
        fragment = number % count
        total, samples = dict.fromkeys(divisions[fragment], 0.0), 0
        for rank, own in enumerate(ranks):
            done[rank] += own.steps
            steps = [move(rank, step) for step in range(sent[fragment][rank], done[rank])]
            sent[fragment][rank] = done[rank]
            weight = sum(number_of for _, number_of in steps)
            samples += weight
            for place in total:
                total[place] = total[place] + weight * sum(moves[place].astype(np.float64) for moves, _ in steps)
        for place in total:
            weights[place] = weights[place] + total[place] / max(1, samples)
    return weights


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("quorum", [None, 1])
def test_each_step_counts_once_in_the_round_that_its_rank_sent_it_in(fragments, quorum, anchors):
    model, ended = plain_model(), []
    config = LocalSGDConfig(
        sync_every=6, fragments=fragments, wait_free=True, round_quorum=quorum, round_grace=0.1 if quorum else 0.25
    )
    initial, move = values(model.weights), move_of(model)
    averager = ParameterAverager(model, config, on_round_ended=ended.append)
    steps, until_s = 0, time.monotonic() + 60
    # Steps are counted, not timed: until all ranks have seen enough rounds.
    while len(ended) < 4 * fragments and time.monotonic() < until_s:
        time.sleep(STEP_S * SPEEDS[RANK])
        moves, samples = move(RANK, steps)
        for variable, change in zip(model.weights, moves, strict=True):
            variable.assign_add(change)
        averager.step(samples + 1)
        steps += 1
    averager.finish()
    rounds, made = COLLECTIVES.allgather(ended), COLLECTIVES.allgather(steps)
    assert len({len(each) for each in rounds}) == 1
    plus_one = lambda rank, step: (move(rank, step)[0], move(rank, step)[1] + 1)
    expected = by_hand(initial, division_of(model, fragments), plus_one, rounds, made)
    assert relative_difference(values(model.weights), expected) < 1e-5
    assert averager.total_samples == sum(plus_one(rank, step)[1] for rank in range(SIZE) for step in range(made[rank]))
    assert averager.total_steps == sum(made)
    assert_equal_in_each_round(anchors, more_than=4 * fragments)
    # Without a quorum, all make their steps.
    fewest = min(own.steps for ranks in rounds for own in ranks)
    assert quorum or fewest >= 6 // fragments


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


WAIT_FREE = {"mode": "local", "sync_every": 6, "wait_free": True}


@pytest.mark.parametrize(
    "more",
    [
        {"fragments": 2, "round_quorum": max(1, SIZE - 1)},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"round_quorum": 1, "sync_dtype": "int8", "outer": "nesterov"}, marks=pytest.mark.long),
    ],
    ids=["fragments and a quorum", "all", "few bits and a quorum of one"],
)
def test_a_replay_is_bit_identical_also_if_it_is_stopped_and_resumed(more, folder, watch, monkeypatch, anchors):
    # Averages are merged when they arrive.
    monkeypatch.setattr(
        "hvdtrain.training.strategies.local.ParameterAverager",
        lambda *args, **options: ParameterAverager(*args, **{**options, "deterministic": False}),
    )
    options = {**WAIT_FREE, **more, "steps": 60}
    record, again = folder / "rounds.jsonl", folder / "again.jsonl"

    with monkeypatch.context() as patch:
        slow_steps(patch, SPEEDS[RANK])
        first = make_run(adam, folder / "first", record=str(record), **options).fit()
    assert_equal_in_each_round(anchors, more_than=6)
    anchors_of_first = list(anchors)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[0] == {"ranks": SIZE}
    assert any(len({steps for steps, _ in ranks}) > 1 for ranks in lines[1:])
    assert any(0 < merged_after < steps for ranks in lines[1:] for steps, merged_after in ranks)
    # Other ranks are slow now.
    anchors.clear()
    with monkeypatch.context() as patch:
        slow_steps(patch, SPEEDS[SIZE - 1 - RANK])
        replayed = make_run(adam, folder / "replayed", replay=str(record), **options).fit()
    assert anchors == anchors_of_first
    for name in ("weights_sha256", "loss", "samples", "steps", "averaging_rounds", "average_late_steps"):
        assert replayed[name] == first[name], name
    trainer = make_run(
        adam,
        folder / "stopped",
        callbacks=[StopAt(watch, 2)],
        job_watch=watch,
        **{**options, "replay": str(record), "record": str(again)},
    )
    step = stopped(trainer)
    assert 0 < step < 60
    resumed = make_run(adam, folder / "stopped", weights=7, replay=str(record), record=str(again), **options).fit()
    assert resumed["resumed_from"] == step
    assert resumed["weights_sha256"] == first["weights_sha256"]
    COLLECTIVES.barrier()
    assert again.read_text() == record.read_text()


class Lines(Reporter):
    """Collects log lines."""

    def __init__(self):
        self.received: list[tuple[int, float]] = []

    def progressed(self, step, values):
        self.received.append((step, values["loss"]))


def test_a_log_line_makes_no_rank_wait_for_another(folder, monkeypatch):
    """While the last rank is in a step, rank 0 makes many, although the round ends, and a line is due."""
    made, run, waited, lines = folder / "steps", TrainStep.run, [], Lines()
    is_late = RANK == SIZE - 1

    def made_by_first() -> int:
        return len(made.read_bytes()) if made.exists() else 0

    def run_and_note(self, steps):
        averager = trainer.parts.strategy._averager
        if is_late and not waited and averager.rounds > 4 and averager._steps > averager.every:
            # It is ready to end the round, which the others then end.
            waited.append(made_by_first())
            until_s = time.monotonic() + 30
            while made_by_first() < waited[0] + 12 and time.monotonic() < until_s:
                time.sleep(STEP_S)
            waited.append(made_by_first())
        time.sleep(STEP_S if is_late else 5 * STEP_S)
        run(self, steps)
        if RANK == 0:
            with made.open("ab") as file:
                file.write(b"." * steps)

    monkeypatch.setattr(TrainStep, "run", run_and_note)
    options = {**WAIT_FREE, "sync_every": 3, "steps": 200, "log_every": 1, "eval_every": 1000}
    trainer = make_run(adam, folder / "run", reporter=lines, **options)
    summary = trainer.fit()
    if is_late:
        assert waited[1] >= waited[0] + 12
    # Each round has a line, in order; the last one is that of the summary.
    steps = [step for step, _ in lines.received]
    assert steps == sorted(set(steps))
    assert len(steps) > 5
    assert lines.received[-1] == (200, summary["loss"])


def test_a_longer_run_than_the_record_is_refused():
    averager = ParameterAverager(plain_model(), LocalSGDConfig(wait_free=True), starts=False)
    averager.replay([OwnRound(3, 0), OwnRound(2, 1)])
    averager.start()
    assert [averager.step() for _ in range(5)] == [False, False, True, False, True]
    with pytest.raises(UsageError, match=r"at least as long\. Received: 2 rounds, and more to make"):
        averager.step()


def test_a_quorum_of_more_ranks_than_there_are_is_refused():
    config = LocalSGDConfig(wait_free=True, round_quorum=SIZE + 1)
    with pytest.raises(UsageError, match=f"round_quorum must be at most the number of ranks. Received: {SIZE + 1} on"):
        ParameterAverager(plain_model(), config)


@pytest.mark.parametrize("is_rank_0", [True, False])
def test_a_rank_that_is_not_ready_is_left_behind_by_a_quorum_only(is_rank_0):
    late = 0 if is_rank_0 else SIZE - 1
    for quorum, ends in ((SIZE - 1, True), (SIZE, False)):
        agreement = RoundAgreement(COLLECTIVES, quorum, grace=0.0)
        found, until_s = False, time.monotonic() + (20.0 if ends else 0.3)
        while not found and time.monotonic() < until_s:
            found = agreement.has_ended(is_ready=late != RANK)
            time.sleep(0.005)
        assert found == ends
        COLLECTIVES.barrier()
        if not ends:
            agreement.wait()
            COLLECTIVES.barrier()
        agreement.close()


def test_ranks_that_are_ready_again_end_the_next_round():
    agreement = RoundAgreement(COLLECTIVES, None, grace=0.0)
    for _ in range(5):
        agreement.wait()
    COLLECTIVES.barrier()
    assert not agreement.has_ended(is_ready=False)
    COLLECTIVES.barrier()
    agreement.close()


def test_a_lost_rank_is_noticed():
    agreement = RoundAgreement(COLLECTIVES, None, grace=0.0)
    COLLECTIVES.barrier()
    if RANK == SIZE - 1:
        agreement.close()
    elif RANK == 0:
        with pytest.raises(ConnectionError, match=f"rank {SIZE - 1}, which can take part in no further Horovod"):
            agreement.wait()
        agreement.close()
    else:
        with pytest.raises(ConnectionError, match="rank 0"):
            agreement.wait()
        agreement.close()
    COLLECTIVES.barrier()
