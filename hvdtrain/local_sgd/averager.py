"""Local SGD: periodic averaging of parameters over ranks."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras

from hvdtrain.config.wording import option
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.model_roles import note_averaged
from hvdtrain.distributed.optimizers import build_optimizer, optimizers_of
from hvdtrain.distributed.snapshot import host_tensor
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.local_sgd.facts import LOSS, SAMPLES, STEPS
from hvdtrain.local_sgd.fragment import Fragment, PendingAverage
from hvdtrain.local_sgd.fragment_division import divided
from hvdtrain.local_sgd.fragment_schedule import FragmentSchedule
from hvdtrain.local_sgd.round_agreement import RoundAgreement
from hvdtrain.local_sgd.sync_interval import SyncInterval
from hvdtrain.optim.pipeline import pipeline_of
from hvdtrain.system.background import ImmediateTask


class OwnRound(NamedTuple):
    """What a rank did in a round with ``wait_free``: all that its timing has decided."""

    steps: int
    """Steps in the round."""
    merged_after: int
    """Steps in the round before the pending average was merged; 0: none was pending."""


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

    A round averages one fragment of the model, the only one by default; with several, each is averaged once in
    ``sync_every`` steps, and has its own displacements, samples and outer optimizer.

    Args:
        model: built, with a plain (not distributed) optimizer; values must be equal on all ranks, except
            statistics, which are synchronized.
        config: when and how to average; ``sync_steps_first`` and ``average_across`` are left to the caller.
        deterministic: merge a pending average at the end of the next round, never earlier.
        starts: False if the caller calls :meth:`start` later.
        collectives: the collectives to average with (default: those of ``hvdtrain.init()``).
        on_round_ended: receives each round with ``wait_free``, apart from those of :meth:`finish`.

    Raises:
        UsageError: an option is invalid, or ``wait_free`` is used with too few ranks.
    """

    def __init__(
        self,
        model: keras.Model,
        config: LocalSGDConfig | None = None,
        *,
        deterministic: bool = False,
        starts: bool = True,
        collectives: Collectives | None = None,
        on_round_ended: Callable[[OwnRound], None] = lambda own: None,
    ):
        self._collectives = collectives or runtime.current().collectives
        note_averaged(model)
        self._config = config = config or LocalSGDConfig()
        if config.wait_free and not self._collectives.may_change:
            _require_ranks(config, self._collectives.size)
        build_optimizer(model)
        self._model = model
        self._merges_when_complete = not deterministic and config.fragment_delay is None
        followed = averaged_variables.followed(model)
        if config.average_slots == "average":
            followed += averaged_variables.slots(model)
        trained = averaged_variables.trained(model)
        self._variables = trained + followed
        self._fragments = [
            Fragment(index, variables, config, self._collectives)
            for index, variables in enumerate(divided(trained, followed, config.fragments))
        ]
        self._schedule = FragmentSchedule(config.fragments)
        self._interval = SyncInterval(config)
        self._agreement: RoundAgreement | None = None
        self._replayed: Sequence[OwnRound] | None = None
        self._on_round_ended = on_round_ended
        self._merged_after = 0
        self._steps = 0
        self.ended_rounds = 0
        """Rounds ended so far."""
        self.rounds = 0
        """Averages merged so far."""
        self.bytes_reduced = 0
        """Bytes that this rank has passed to the allreduce."""
        self.largest_round_bytes = 0
        """The most bytes that this rank has passed to it in one round."""
        self.total_staleness_steps = 0
        """Sum over rounds of the steps made between sending and merging."""
        self.max_staleness_steps = 0
        """Maximum over rounds of the steps made between sending and merging."""
        self.total_steps = 0
        """Steps of all ranks that have been averaged, in all fragments."""
        self.total_samples = 0
        """Samples of all ranks that have been averaged, in all fragments."""
        self._reducing_s = self._waited_s = 0.0
        if starts:
            self.start()

    @property
    def every(self) -> int:
        """The number of steps of the current round."""
        if self._replayed is not None:
            return self._own_replayed().steps
        return self._schedule.steps(self._interval.steps)

    @property
    def steps_until_due(self) -> int:
        """Steps left until parameters are due to be averaged, or an average is due to be merged; 1 if overdue."""
        left = [self.every - self._steps]
        if (delay := self._merge_delay()) is not None:
            left += [delay - each.pending.steps_since for each in self._fragments if each.pending is not None]
        return max(1, min(left))

    def _merge_delay(self) -> int | None:
        """Steps after which a pending average is merged, if they are fixed."""
        return self._config.fragment_delay if self._replayed is None else self._own_replayed().merged_after

    @property
    def is_between_cycles(self) -> bool:
        """Whether the round that ended last was the last one of a cycle, in which each fragment is averaged once."""
        return self._schedule.next == 0

    def start(self) -> None:
        """Starts the first round. All ranks must call it before they make a step.

        Raises:
            UsageError: the optimizer is distributed.
            DisagreementError: ranks differ in options or model.
        """
        if not self._is_started:
            pipelines = [pipeline_of(each) for each in optimizers_of(self._model)]
            if any(each is not None and each.reduce.collectives is self._collectives for each in pipelines):
                raise UsageError(
                    "local SGD needs a plain optimizer: one that averages gradients over all ranks leaves nothing to "
                    "average. Received: a distributed optimizer. Compile the model with the plain one."
                )
            facts = {**dataclasses.asdict(self._config), **replica_consistency.structure(self._model)}
            require_agreement("options and model to average", facts, self._collectives)
            replica_consistency.share_statistics(self._model, self._collectives)
            for fragment in self._fragments:
                fragment.begin()
        self.connect()

    def connect(self) -> None:
        """Connects the ranks, if they agree on when rounds end. All ranks must call it."""
        if self._config.wait_free and self._replayed is None:
            self._agreement = RoundAgreement(self._collectives, self._config.round_quorum, self._config.round_grace)

    def disconnect(self) -> None:
        """Disconnects this rank from the others."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def replay(self, rounds: Sequence[OwnRound]) -> None:
        """Call it before :meth:`start`: rounds are these ones of this rank, counted from the first of the run."""
        self._replayed = rounds

    def _own_replayed(self) -> OwnRound:
        assert self._replayed is not None
        if self.ended_rounds == len(self._replayed):
            raise UsageError(
                f"{option('replay')} must be the record of a run that is at least as long. Received: "
                f"{len(self._replayed)} rounds, and more to make."
            )
        return self._replayed[self.ended_rounds]

    @property
    def _is_started(self) -> bool:
        return self._fragments[0].is_started

    def step(self, samples: int = 1, *, steps: int = 1, loss: float = 0.0, stop: bool = False) -> bool:
        """Records local steps and averages parameters if due.

        Args:
            samples: samples of these steps, this rank's weight in the average.
            steps: number of steps; more than :attr:`steps_until_due` delay what is due.
            loss: sum of the steps' losses, for ``sync_schedule='adacomm'``.
            stop: this rank is ready to end the round now (``wait_free``).

        Returns:
            Whether a round has ended.
        """
        self.record(samples, steps, loss)
        for fragment in self._fragments:
            if fragment.pending is not None and self._is_due(fragment.pending):
                self._merge(fragment)
        if self._config.wait_free:
            return self._step_wait_free(stop)
        if self._steps < self.every:
            return False
        self._end_round()
        return True

    def record(self, samples: int, steps: int, loss: float) -> None:
        """Records local steps, and averages nothing."""
        self._steps += steps
        for fragment in self._fragments:
            fragment.record(samples, steps, loss)

    def _is_due(self, pending: PendingAverage) -> bool:
        """Whether an average is due to be merged in the middle of a round."""
        if (delay := self._merge_delay()) is not None:
            return pending.steps_since >= delay
        return self._merges_when_complete and pending.totals.is_done

    def _step_wait_free(self, stop: bool) -> bool:
        if not self._has_ended(stop):
            return False
        self._end_round()
        return True

    def _has_ended(self, stop: bool) -> bool:
        is_ready = self._steps >= self.every
        if self._agreement is None:
            return is_ready
        # The next average is sent when the last one has arrived: until then, nobody has to wait.
        has_arrived = all(each.pending is None or each.pending.totals.is_done for each in self._fragments)
        return self._agreement.has_ended(stop or (is_ready and has_arrived))

    def finish(self) -> None:
        """Makes the final averages. Collective: waits until all ranks have called it."""
        self._merge_pending()
        while not all(each.is_finished for each in self._fragments):
            if self._agreement is not None:
                self._agreement.wait()
            self._end_round(finished=True)
            self._merge_pending()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Sets the model to what :meth:`finish` would produce; restores this rank's own values on exit.

        Collective: all ranks must call it. Variables that were changed inside the block keep their new values.
        """
        if self.in_sync:
            yield
            return
        own = [(variable, host_tensor(variable)) for variable in self._variables]
        try:
            for fragment in self._fragments:
                fragment.assign_averaged()
        except BaseException:
            for variable, value in own:
                variable.assign(value)
            raise
        with replica_consistency.restored(own):
            yield

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
            "average_bytes_max": self.largest_round_bytes,
            "average_hidden_share": 1 - self._waited_s / self._reducing_s if self._reducing_s else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint that is common to all ranks. May merge pending averages."""
        self._merge_same()
        return {
            "fragments": [fragment.state() for fragment in self._fragments],
            "period": self._interval.state(),
            "rounds": self.rounds,
            "ended_rounds": self.ended_rounds,
            "total_steps": self.total_steps,
            "total_samples": self.total_samples,
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint, except variables. Waits for pending averages, and may merge
        them."""
        self._merge_same()
        return {
            "fragments": [fragment.rank_state() for fragment in self._fragments],
            "next": self._schedule.next,
            "steps": self._steps,
            "late_steps": self.total_staleness_steps,
            "most_late_steps": self.max_staleness_steps,
            "bytes_reduced": self.bytes_reduced,
            "largest_round_bytes": self.largest_round_bytes,
        }

    def _merge_same(self) -> None:
        """Merges what other ranks may have merged already: a checkpoint has the same anchor for all ranks.

        With wait_free, all ranks have merged the same averages at the end of a round.
        """
        if self._merges_when_complete and not self._config.wait_free:
            self._merge_pending()

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state` and :meth:`rank_state` returned.

        Args:
            rank_state: None if the number of ranks has changed: a new cycle starts with the averaged model.
        """
        self._restore_common(state)
        owns = [None] * len(self._fragments) if rank_state is None else rank_state["fragments"]
        for fragment, common, own in zip(self._fragments, state["fragments"], owns, strict=True):
            fragment.restore(common, own)
        if rank_state is None or not self._is_started:
            return
        self._schedule.next, self._steps = rank_state["next"], rank_state["steps"]
        self.total_staleness_steps = rank_state["late_steps"]
        self.max_staleness_steps = rank_state["most_late_steps"]
        self.bytes_reduced = rank_state["bytes_reduced"]
        self.largest_round_bytes = rank_state["largest_round_bytes"]

    def _restore_common(self, state: Mapping[str, Any]) -> None:
        self._interval.restore(state["period"])
        self.rounds, self.ended_rounds = state["rounds"], state["ended_rounds"]
        self.total_steps, self.total_samples = state["total_steps"], state["total_samples"]

    # For ranks that change.

    @property
    def position(self) -> tuple[int, int]:
        """The number of completed averages, and of the steps since the fragment that is due longest was sent."""
        return self.rounds, max(each.steps for each in self._fragments)

    def settle(self) -> None:
        """Ends what is under way: merges averages that are complete, and takes back what this rank has sent for others.

        Call it when the collectives have been cut, or are idle.
        """
        self.disconnect()
        for fragment in self._fragments:
            if fragment.pending is not None:
                if fragment.pending.totals.has_failed:
                    self._steps += fragment.take_back()
                    self._schedule.go_back()
                else:
                    self._merge(fragment)

    def average_all(self) -> None:
        """Averages all fragments now, and merges the averages. All ranks must call it, at the same step, or between
        two rounds."""
        self._merge_pending()
        # With wait_free, a rank that has just joined has made no step, and takes part.
        if self._config.wait_free or any(each.steps for each in self._fragments):
            for _ in self._fragments:
                self._end_round()
            self._merge_pending()

    def end_round_if_due(self) -> None:
        """Ends the round if it has its steps, and merges its average. All ranks must call it, at the same step."""
        if self._steps >= self.every:
            self._end_round()
            self._merge_pending()

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Takes over the last averages from a rank that has received them, where this rank's collectives failed.

        Args:
            state: what :meth:`state` returns on the other rank.
        """
        self._restore_common(state)
        for fragment, common in zip(self._fragments, state["fragments"], strict=True):
            if fragment.rounds < common["rounds"]:
                self._steps -= fragment.adopt(common)
                self._schedule.advance()

    def round_in_progress(self) -> dict[str, Any]:
        """The round that :meth:`start_round` joins on another rank."""
        return {
            "next": self._schedule.next,
            "steps": self._steps,
            "steps_of_fragments": [each.steps for each in self._fragments],
        }

    def start_round(self, state: Mapping[str, Any], in_progress: Mapping[str, Any], *, steps_since: int) -> None:
        """Joins a round in progress from another rank's last averages.

        Args:
            state: what :meth:`state` returns on the other rank.
            in_progress: what :meth:`round_in_progress` returns there.
            steps_since: steps that ranks which make them together have made since.
        """
        self._restore_common(state)
        self._schedule.next = in_progress["next"]
        makes_own = self._config.wait_free
        self._steps = 0 if makes_own else in_progress["steps"] + steps_since
        missed = zip(self._fragments, state["fragments"], in_progress["steps_of_fragments"], strict=True)
        for fragment, common, steps in missed:
            fragment.join(common, 0 if makes_own else steps + steps_since)

    # Internals of a round.

    def _end_round(self, finished: bool = False) -> None:
        """Averages the fragment whose turn it is."""
        if self._config.fragment_delay is None:
            self._merge_pending()
        fragment = self._fragments[self._schedule.next]
        # One after the other: so the network is shared by no two of them.
        before = self._fragments[self._schedule.next - 1].pending
        after = None if before is None else before.totals
        num_bytes = fragment.send(finished=finished, after=after, round_steps=self._steps)
        self.bytes_reduced += num_bytes
        self.largest_round_bytes = max(self.largest_round_bytes, num_bytes)
        self._schedule.advance()
        if not finished:
            self._on_round_ended(OwnRound(self._steps, self._merged_after))
        self.ended_rounds += 1
        self._steps = self._merged_after = 0
        # With wait_free, ranks infer the progress of all from the averages merged so far: all must have merged the same
        # ones.
        assert fragment.pending is not None
        if not self._config.in_background or (not self._config.wait_free and self._is_due(fragment.pending)):
            self._merge(fragment)

    def _merge_pending(self) -> None:
        for fragment in self._fragments:
            if fragment.pending is not None:
                self._merge(fragment)

    def _merge(self, fragment: Fragment) -> None:
        assert fragment.pending is not None
        pending, totals = fragment.pending, fragment.pending.totals
        began_s = time.perf_counter()
        totals.result()
        self._waited_s += totals.duration_s if isinstance(totals, ImmediateTask) else time.perf_counter() - began_s
        self._reducing_s += totals.duration_s
        facts = fragment.merge()
        self.rounds += 1
        self._merged_after = pending.steps_since
        self.total_staleness_steps += pending.steps_since
        self.max_staleness_steps = max(self.max_staleness_steps, pending.steps_since)
        if fragment is self._fragments[-1]:
            self.total_steps += round(facts[STEPS])
            self.total_samples += round(facts[SAMPLES])
        self._interval.round_ended(facts[LOSS], round(facts[STEPS]))

    @property
    def in_sync(self) -> bool:
        """Whether all replicas are known to be equal: every rank has just merged an average."""
        if self._config.in_background and not all(each.is_finished for each in self._fragments):
            return False  # Another rank may not have merged it yet.
        return all(each.is_averaged for each in self._fragments)


def _require_ranks(config: LocalSGDConfig, size: int) -> None:
    if size == 1:
        raise UsageError("wait_free needs at least 2 ranks. Received: 1 rank. Remove it.")
    if config.round_quorum is not None and config.round_quorum > size:
        raise UsageError(
            f"{option('round_quorum')} must be at most the number of ranks. Received: {config.round_quorum} on {size}."
        )
