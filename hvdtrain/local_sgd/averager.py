"""Local SGD: periodic averaging of parameters over ranks."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.model_roles import note_averaged
from hvdtrain.distributed.optimizers import build_optimizer, optimizers_of
from hvdtrain.distributed.snapshot import host_tensor
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd.anchor_update import AnchorUpdate
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.local_sgd.displacement_sum import DisplacementSum
from hvdtrain.local_sgd.facts import FINISHED, LOSS, SAMPLES, STEPS, no_facts, split_facts, with_facts
from hvdtrain.local_sgd.finite_values import are_finite, non_finite_error, non_finite_paths
from hvdtrain.local_sgd.flat_variables import FlatVariables, arrays
from hvdtrain.local_sgd.outer_optimizer import Flats, make_outer_optimizer
from hvdtrain.local_sgd.sync_interval import SyncInterval
from hvdtrain.optim.pipeline import pipeline_of
from hvdtrain.system.background import BackgroundTask, ImmediateTask


@dataclasses.dataclass
class _PendingAverage:
    """The average of a round whose allreduce has started, not yet merged."""

    sent: Flats
    """This rank's values when the allreduce started."""
    totals: BackgroundTask[Flats] | ImmediateTask[Flats]
    """Sums over all ranks: displacements times samples, and the facts."""
    steps_since: int = 0


class ParameterAverager:
    """Averages a model's parameters over ranks after every ``sync_every`` local steps.

    ::

        hvdtrain.broadcast(model)
        averager = hvdtrain.ParameterAverager(model, hvdtrain.LocalSGDConfig(sync_every=16))
        for x, y in dataset:
            train_step(x, y)                 # with the plain optimizer
            averager.step(samples=len(x))
        averager.finish()

    All float variables of the model and the EMA of its weights are averaged, and with ``average_slots='average'`` the
    optimizer's slots. Ranks reduce the displacement of each variable since the previous round, weighted by the
    samples they have seen. Rounds may differ in length between ranks: a rank that has finished takes part with
    weight 0 until all have finished.

    Args:
        model: built, with a plain (not distributed) optimizer; values must be equal on all ranks, except
            statistics, which are synchronized.
        config: when and how to average; ``sync_steps_first`` and ``average_across`` are left to the caller.
        deterministic: merge a pending average at the end of the next round, never earlier.
        starts: False if the caller calls :meth:`start` later.
        collectives: the collectives to average with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option is invalid, or ``wait_free`` is used with a single rank.
    """

    def __init__(
        self,
        model: keras.Model,
        config: LocalSGDConfig | None = None,
        *,
        deterministic: bool = False,
        starts: bool = True,
        collectives: Collectives | None = None,
    ):
        self._collectives = collectives or runtime.current().collectives
        note_averaged(model)
        self._config = config = config or LocalSGDConfig()
        if config.wait_free and self._collectives.size == 1:
            raise UsageError("wait_free needs at least 2 ranks. Received: 1 rank. Remove it.")
        build_optimizer(model)
        self._model = model
        self._deterministic = deterministic
        followed = averaged_variables.followed(model)
        if config.average_slots == "average":
            followed += averaged_variables.slots(model)
        trained = averaged_variables.trained(model)
        self._flats = FlatVariables(trained, followed)
        self._variables = trained + followed
        self._anchor_update = AnchorUpdate(make_outer_optimizer(config), num_trained=self._flats.ends[0])
        self._sum = DisplacementSum(self._collectives, config.sync_dtype, num_trained=self._flats.ends[0])
        self._interval = SyncInterval(config)
        self._anchor: Flats | None = None
        self._velocity: Flats = ()
        self._pending: _PendingAverage | None = None
        self._closing: BackgroundTask[Flats] | None = None
        self._samples = self._steps = self._missed_steps = 0
        self._loss = 0.0
        self.rounds = 0
        """Averages merged so far."""
        self.bytes_reduced = 0
        """Bytes that this rank has passed to the allreduce."""
        self.total_staleness_steps = 0
        """Sum over rounds of the steps made between sending and merging."""
        self.max_staleness_steps = 0
        """Maximum over rounds of the steps made between sending and merging."""
        self.total_steps = 0
        """Steps of all ranks in all completed rounds."""
        self.total_samples = 0
        """Samples of all ranks in all completed rounds."""
        self._num_finished = 0
        self._reducing_s = self._waited_s = 0.0
        if starts:
            self.start()

    @property
    def every(self) -> int:
        """The current number of steps per round."""
        return self._interval.steps

    @property
    def steps_to_round_end(self) -> int:
        """Steps left until parameters are due to be averaged; 1 if that is overdue."""
        return max(1, self.every - self._steps)

    def start(self) -> None:
        """Starts the first round. All ranks must call it before they make a step.

        Raises:
            UsageError: the optimizer is distributed.
            DisagreementError: ranks differ in options or model.
        """
        if self._anchor is None:
            pipelines = [pipeline_of(each) for each in optimizers_of(self._model)]
            if any(each is not None and each.reduce.collectives is self._collectives for each in pipelines):
                raise UsageError(
                    "local SGD needs a plain optimizer: one that averages gradients over all ranks leaves nothing to "
                    "average. Received: a distributed optimizer. Compile the model with the plain one."
                )
            facts = {**dataclasses.asdict(self._config), **replica_consistency.structure(self._model)}
            require_agreement("options and model to average", facts, self._collectives)
            replica_consistency.share_statistics(self._model, self._collectives)
            self._anchor = self._flats.read()

    def step(self, samples: int = 1, *, steps: int = 1, loss: float = 0.0, stop: bool = False) -> bool:
        """Records local steps and averages parameters if due.

        Args:
            samples: samples of these steps, this rank's weight in the average.
            steps: number of steps; more than :attr:`steps_to_round_end` make the round longer.
            loss: sum of the steps' losses, for ``sync_schedule='adacomm'``.
            stop: this rank is ready to end the round now (``wait_free``).

        Returns:
            Whether a round has ended.
        """
        self.record(samples, steps, loss)
        if self._pending is not None:
            self._pending.steps_since += steps
            if not self._deterministic and self._pending.totals.is_done:
                self._merge()
        if self._config.wait_free:
            return self._step_wait_free(stop)
        if self._steps < self.every:
            return False
        self._end_round()
        return True

    def record(self, samples: int, steps: int, loss: float) -> None:
        """Records local steps, and averages nothing."""
        self._samples += samples
        self._steps += steps
        self._loss += loss

    def _step_wait_free(self, stop: bool) -> bool:
        if self._closing is None and (stop or self._steps >= self.every):
            self._closing = self._is_ready()
        if self._closing is None or not self._closing.is_done:
            return False
        self._closing.result()
        self._closing = None
        self._end_round()
        return True

    def _is_ready(self) -> BackgroundTask[Flats]:
        """Announces that this rank is ready to end the round; completes in the background when all ranks are."""
        return BackgroundTask(lambda: self._collectives.sum_tensors([tf.zeros([1])], "hvdtrain_round"), "round")

    def finish(self) -> None:
        """Makes the final average. Collective: waits until all ranks have called it."""
        while self._num_finished < self._collectives.size:
            if self._config.wait_free:
                (self._closing or self._is_ready()).result()
                self._closing = None
            self._end_round(finished=True)
            if self._pending is not None:
                self._merge()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Sets the model to what :meth:`finish` would produce; restores this rank's own values on exit.

        Collective: all ranks must call it. Variables that were changed inside the block keep their new values.
        """
        if self.in_sync:
            yield
            return
        assert self._anchor is not None
        own = [(variable, host_tensor(variable)) for variable in self._variables]
        try:
            self._assign_averaged(self._anchor)
        except BaseException:
            for variable, value in own:
                variable.assign(value)
            raise
        with replica_consistency.restored(own):
            yield

    def _assign_averaged(self, anchor: Flats) -> None:
        facts = pending_facts = no_facts()
        # One tensor at a time: the averaged model is all that is needed at once.
        for i, start in enumerate(anchor):
            now, velocity = self._flats.read_one(i), self._velocity[i : i + 1]
            if self._pending is not None:
                total = self._pending.totals.result()[i]
                if i == 0:
                    total, pending_facts = split_facts(total)
                start, velocity = self._anchor_update.one(i, total, pending_facts, start, velocity)
                now = start + (now - self._pending.sent[i]) if self._pending.steps_since else start
            message = self._samples * self._sum.displacement(i, now, start)
            if i == 0:
                message = self._with_facts(message, finished=False)
            (total,) = self._collectives.sum_tensors([message], f"hvdtrain_view_{i}")
            if i == 0:
                total, facts = split_facts(total)
            self._flats.assign_one(i, self._anchor_update.one(i, total, facts, start, velocity)[0])

    def summary(self) -> dict[str, Any]:
        """The fields of ``summary.json`` about averaging."""
        samples = {"samples": self.total_samples} if self._config.wait_free else {}
        return {
            **samples,
            "averaging_rounds": self.rounds,
            "average_late_steps": {
                "mean": self.total_staleness_steps / max(1, self.rounds),
                "max": self.max_staleness_steps,
            },
            "average_hidden_share": 1 - self._waited_s / self._reducing_s if self._reducing_s else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint that is common to all ranks."""
        return {
            "anchor": None if self._anchor is None else arrays(self._anchor),
            "velocity": arrays(self._velocity),
            "period": self._interval.state(),
            "rounds": self.rounds,
            "total_steps": self.total_steps,
            "total_samples": self.total_samples,
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint, except variables. Waits for a pending average."""
        pending = self._pending
        return {
            "samples": self._samples,
            "steps": self._steps,
            "loss": self._loss,
            "late_steps": self.total_staleness_steps,
            "most_late_steps": self.max_staleness_steps,
            "bytes_reduced": self.bytes_reduced,
            "pending": None
            if pending is None
            else {
                "sent": arrays(pending.sent),
                "totals": arrays(pending.totals.result()),
                "steps_since": pending.steps_since,
            },
            "sum": self._sum.state(),
        }

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state` and :meth:`rank_state` returned.

        Args:
            rank_state: None if the number of ranks has changed: a new round starts with the averaged model.
        """
        self._velocity = [tf.constant(each) for each in state["velocity"]]
        self._interval.restore(state["period"])
        self.rounds = state["rounds"]
        self.total_steps, self.total_samples = state["total_steps"], state["total_samples"]
        if rank_state is None or state["anchor"] is None:
            return
        self._anchor = [tf.constant(each) for each in state["anchor"]]
        self._samples, self._steps, self._loss = rank_state["samples"], rank_state["steps"], rank_state["loss"]
        self.total_staleness_steps = rank_state["late_steps"]
        self.max_staleness_steps = rank_state["most_late_steps"]
        self.bytes_reduced = rank_state["bytes_reduced"]
        self._sum.restore(rank_state["sum"])
        if (pending := rank_state["pending"]) is not None:
            totals = [tf.constant(each) for each in pending["totals"]]
            sent = [tf.constant(each) for each in pending["sent"]]
            self._pending = _PendingAverage(sent, ImmediateTask(lambda: totals), pending["steps_since"])

    # For ranks that change.

    @property
    def position(self) -> tuple[int, int]:
        """The number of completed rounds, and of the steps in the current one."""
        return self.rounds, self._steps

    def end_round(self, *, only_if_due: bool = False) -> None:
        """Ends the round now, unless no step was made in it. All ranks must call it, at the same step."""
        if self._steps >= (self.every if only_if_due else 1):
            self._end_round()

    def start_round(self, state: Mapping[str, Any], *, missed_steps: int) -> None:
        """Joins a round in progress from another rank's last average, after that rank has made ``missed_steps`` in
        it."""
        mine = {**self.rank_state(), "samples": 0, "steps": missed_steps, "loss": 0.0, "pending": None, "sum": None}
        self.restore(state, mine)
        self._missed_steps = missed_steps
        self._flats.assign(self._anchor)

    # Internals of a round.

    def _end_round(self, finished: bool = False) -> None:
        if self._pending is not None:
            self._merge()
        self._send(finished)
        assert self._pending is not None
        is_done = self._pending.totals.is_done and not self._deterministic
        # With wait_free, ranks infer the progress of all from the averages merged so far: all must have merged the same
        # ones.
        if not self._config.in_background or (is_done and not self._config.wait_free):
            self._merge()

    def _send(self, finished: bool) -> None:
        assert self._anchor is not None
        sent = self._flats.read()
        self._require_own_finite(sent)
        message = self._message(sent, self._anchor, finished)
        self.bytes_reduced += self._sum.num_bytes(message)
        samples = self._samples

        def reduce() -> Flats:
            return self._sum.sum(message, samples)

        self._pending = _PendingAverage(
            sent, BackgroundTask(reduce, "average") if self._config.in_background else ImmediateTask(reduce)
        )
        # Reset only now: if a rank is lost meanwhile, the others average these steps again without it.
        self._samples = self._steps = self._missed_steps = 0
        self._loss = 0.0

    def _message(self, values: Flats, anchor: Flats, finished: bool) -> list[tf.Tensor]:
        """This rank's contribution: displacements times samples, and the facts."""
        pairs = enumerate(zip(values, anchor, strict=True))
        message = [self._samples * self._sum.displacement(i, value, start) for i, (value, start) in pairs]
        return [self._with_facts(message[0], finished), *message[1:]]

    def _with_facts(self, first: tf.Tensor, finished: bool) -> tf.Tensor:
        steps = self._steps - self._missed_steps
        return with_facts(first, samples=self._samples, steps=steps, loss=self._loss, finished=finished)

    def _merge(self) -> None:
        """Merges the pending average; steps made since it was sent are kept."""
        assert self._pending is not None
        assert self._anchor is not None
        pending, totals = self._pending, self._pending.totals
        began_s = time.perf_counter()
        totals.result()
        self._waited_s += totals.duration_s if isinstance(totals, ImmediateTask) else time.perf_counter() - began_s
        self._reducing_s += totals.duration_s
        self._require_finite(totals.result())
        anchor, self._velocity, facts = self._anchor_update.all(totals.result(), self._anchor, self._velocity)
        since = zip(anchor, self._flats.read(), pending.sent, strict=True) if pending.steps_since else ()
        self._flats.assign([a + (now - sent) for a, now, sent in since] or anchor)
        self._anchor, self._pending = anchor, None
        self._sum.merged()
        self.rounds += 1
        self.total_staleness_steps += pending.steps_since
        self.max_staleness_steps = max(self.max_staleness_steps, pending.steps_since)
        self.total_steps += round(facts[STEPS])
        self.total_samples += round(facts[SAMPLES])
        self._num_finished = round(facts[FINISHED])
        self._interval.round_ended(facts[LOSS], round(facts[STEPS]))

    def _require_finite(self, totals: Flats) -> None:
        """Raises NonFiniteError on every rank if a replica would make all others non-finite."""
        if are_finite(totals):
            return
        if self._config.in_background:
            # Ranks merge at different steps and cannot gather anything here. Each has sent finite values.
            raise non_finite_error([], rank=self._collectives.rank)
        raise non_finite_error(self._collectives.allgather(non_finite_paths(self._variables)))

    def _require_own_finite(self, values: Flats) -> None:
        """Raises NonFiniteError on this rank alone, before others receive its values in the background."""
        if self._config.in_background and not are_finite(values):
            rank = self._collectives.rank
            raise non_finite_error([*[[]] * rank, non_finite_paths(self._variables)], rank=rank)

    @property
    def in_sync(self) -> bool:
        """Whether all replicas are known to be equal: every rank has just merged an average."""
        if self._config.in_background and self._num_finished < self._collectives.size:
            return False  # Another rank may not have merged it yet.
        return self._anchor is not None and self._steps == 0
