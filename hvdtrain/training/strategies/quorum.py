"""Synchronous training with backup workers: a step closes before the slowest ranks have made their micro-batches.

Source: Chen et al., "Revisiting distributed synchronous SGD", arXiv:1604.00981; TensorFlow's SyncReplicasOptimizer.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.model_state import Averaged
from hvdtrain.config.wording import option
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.channel import open_channel
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.optim.distributed_optimizer import gradient_bytes
from hvdtrain.optim.learning_rate import follow_steps
from hvdtrain.system.terminal import rank_name
from hvdtrain.training.config import QuorumConfig, RecordConfig
from hvdtrain.training.quorum.contributions import read_contributions
from hvdtrain.training.quorum.exchange import GradientExchange
from hvdtrain.training.quorum.feed import QuorumFeed
from hvdtrain.training.quorum.ledger import QuorumLedger
from hvdtrain.training.quorum.split_step import SplitStep
from hvdtrain.training.record_file import RecordFile
from hvdtrain.training.strategies.strategy import Strategy, StrategyContext


class QuorumStrategy(Strategy):
    """Makes each update with the micro-batches of the ranks that are ready; the others keep theirs for the next.

    Replicas stay equal: a rank that was late makes the updates that it missed, in order. Only the main thread touches
    variables.

    Raises:
        UsageError: there are fewer ranks than have to be ready, or their number may change.
    """

    mode = "sync"
    marks: tuple[int, ...] = ()
    in_lockstep = False
    ranks_are_independent = False

    def __init__(self, context: StrategyContext, config: QuorumConfig, recording: RecordConfig):
        collectives = context.collectives
        assert isinstance(context.feed, QuorumFeed)
        assert config.quorum is not None
        if config.quorum > collectives.size:
            raise UsageError(
                f"{option('quorum')} must be at most the number of ranks. Received: {config.quorum} on "
                f"{collectives.size}."
            )
        self._model = context.model
        self._plan = context.plan()
        self.progress = context.progress
        self.train_step = context.train_step
        self._feed = context.feed
        self._collectives = collectives
        self._job_watch = context.job_watch
        self._config = config
        self._ledger = QuorumLedger(context.plan(), config)
        self._step_of_schedule = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._replay = recording.replay
        self._file = None if recording.record is None else RecordFile(recording.record, collectives.size, "updates")
        self._split_step: SplitStep | None = None
        self._exchange: GradientExchange | None = None
        self._dropped = self._requeued_samples = 0
        self._late_s: dict[int, float] = {}
        """How long after an update had closed this rank's micro-batch for it was made."""
        self._undo_schedules: list[Callable[[], None]] = []
        self._logged = (0, 0)
        self._named: set[int] = set()
        self._hosts: list[str] = []

    def start(self) -> None:
        path, size = self._replay, self._collectives.size
        if path is not None:
            replayed = on_first_rank(lambda: read_contributions(path, size), self._collectives)
            self._ledger.replay(replayed)
        if self._file is not None:
            file = self._file
            on_every_rank(
                lambda: file.start(self._ledger.updates) if self._collectives.rank == 0 else None, self._collectives
            )
        data_spec, _ = self._feed.element_spec
        # Before the update is compiled, which reads the learning rate.
        self._undo_schedules = [follow_steps(leaf, self._step_of_schedule) for leaf in leaves_of(self._model)]
        self._step_of_schedule.assign(self.progress.step)
        self._split_step = on_every_rank(lambda: SplitStep(self._model, self.train_step, data_spec), self._collectives)
        channel = open_channel(self._collectives)
        self._hosts = channel.hosts
        self._exchange = GradientExchange(
            self._collectives, channel, self._split_step.zeros, first_update=self._ledger.updates
        )

    def run(self, max_steps: int) -> None:
        progress = self.progress
        before = progress.step
        while progress.step == before:
            self._job_watch.heartbeat("training", before)
            self._make_update()
            progress.step = self._ledger.step
        progress.reduced_steps = self._ledger.updates
        self._step_of_schedule.assign(progress.step)

    @property
    def has_closed(self) -> bool:
        """Whether the current update has closed without a micro-batch of this rank."""
        return self._exchange is not None and self._exchange.has_closed

    def _make_update(self) -> None:
        """Makes one update, with a micro-batch of this rank if it is ready in time."""
        exchange, step, ledger = self._exchange, self._split_step, self._ledger
        assert exchange is not None
        assert step is not None
        rule, own, made_s = ledger.rule(), None, 0.0
        micro_batch = ledger.shares.next_of(self._collectives.rank)
        if micro_batch is not None and self._collectives.rank in rule.active and not exchange.has_closed:
            exchange.begin(ledger.updates)
            data = self._feed.batch(ledger.shares, micro_batch)
            own = step.gradients(data, micro_batch.count / self._plan.batch_size)
            made_s = time.perf_counter()
            if not exchange.has_closed:
                exchange.offer(ledger.updates, own, rule)
        closed = exchange.take()
        has_contributed = self._collectives.rank in closed.contributors
        if own is not None and not has_contributed:
            assert micro_batch is not None
            step.drop()
            self._dropped += 1
            self._requeued_samples += micro_batch.count
            self._late_s[ledger.updates] = max(0.0, made_s - closed.closed_s)
        step.update(
            own if own is not None and has_contributed else step.zeros,
            closed.sums,
            ledger.batch_weight(closed.contributors),
            has_contributed=has_contributed,
        )
        ledger.record(closed.contributors)
        if self._file is not None:
            self._file.add(closed.contributors)

    def synchronized(self) -> AbstractContextManager[None]:
        return replica_consistency.shared_statistics(self._model, self._collectives)

    def compare_replicas(self) -> None:
        replica_consistency.require_equal_replicas(self._model, self._collectives, self.progress.step)

    def finish(self) -> None:
        """Nothing to do: replicas are equal."""

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        if self._file is not None:
            self._file.close()
        for undo in self._undo_schedules:
            undo()

    @property
    def updates(self) -> int:
        """More than one in some steps."""
        return self.train_step.steps_made

    @property
    def averaged(self) -> Averaged | None:
        return None

    @property
    def bytes_reduced(self) -> int:
        updates = self.progress.reduced_steps
        return sum(gradient_bytes(each, updates) for each in optimizers_of(self._model))

    def gauges(self) -> dict[str, float]:
        (updates, samples), now = self._logged, (self._ledger.updates, self._ledger.samples)
        self._logged = now
        if now[0] == updates:
            return {}
        return {"effective_batch": (now[1] - samples) / (now[0] - updates), "missed_updates": sum(self._ledger.missed)}

    def warnings(self) -> list[str]:
        most = self._config.max_missed_updates
        found = [r for r, num in enumerate(self._ledger.missed_in_a_row) if num >= most and r not in self._named]
        self._named.update(found)
        return [
            f"{rank_name(rank, self._hosts[rank])} has missed {most} updates in a row: all ranks now wait for it each "
            f"time that it does. If it is always slower, use {option('balance', True)}"
            for rank in found
        ]

    def summary(self) -> dict[str, Any]:
        ledger = self._ledger
        everyone = self._collectives.allgather((self._dropped, self._requeued_samples, self._late_s))
        saved_s: dict[int, float] = {}
        for _, _, late_s in everyone:
            for update, seconds in late_s.items():
                saved_s[update] = max(seconds, saved_s.get(update, 0.0))
        return {
            "averaging_rounds": 0,
            "samples": ledger.samples,
            "updates": ledger.updates,
            "effective_batch": ledger.effective_batch(),
            "dropped_micro_batches": [dropped for dropped, _, _ in everyone],
            "requeued_samples": [samples for _, samples, _ in everyone],
            "missed_updates": list(ledger.missed),
            "time_saved_seconds": sum(saved_s.values()),
        }

    def state(self) -> dict[str, Any]:
        if self._file is not None:
            self._file.flush()
        return self._ledger.state()

    def rank_state(self) -> dict[str, Any]:
        updates = sorted(self._late_s)
        return {
            "dropped": self._dropped,
            "requeued_samples": self._requeued_samples,
            "late_updates": np.array(updates, np.int64),
            "late_s": np.array([self._late_s[each] for each in updates]),
        }

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        assert state is not None
        self._ledger.restore(state)
        self._logged = (self._ledger.updates, self._ledger.samples)
        if rank_state is not None:
            self._dropped, self._requeued_samples = rank_state["dropped"], rank_state["requeued_samples"]
            updates, late_s = (np.asarray(rank_state[name]).tolist() for name in ("late_updates", "late_s"))
            self._late_s = dict(zip(updates, late_s, strict=True))
