"""A fragment: variables that are averaged together, with all that belongs to their rounds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.local_sgd.anchor_update import AnchorUpdate
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.local_sgd.displacement_sum import DisplacementSum
from hvdtrain.local_sgd.facts import FINISHED, no_facts, split_facts, with_facts
from hvdtrain.local_sgd.finite_values import are_finite, non_finite_error, non_finite_paths
from hvdtrain.local_sgd.flat_variables import FlatVariables, arrays
from hvdtrain.local_sgd.fragment_division import FragmentVariables
from hvdtrain.local_sgd.outer_optimizer import Flats, make_outer_optimizer
from hvdtrain.system.background import BackgroundTask, ImmediateTask

Totals = BackgroundTask[Flats] | ImmediateTask[Flats]
"""Sums over all ranks: displacements times samples, and the facts."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What this rank contributes to an average."""

    sent: Flats
    """Its values when the allreduce started."""
    samples: int
    steps: int
    missed_steps: int
    loss: float
    round_steps: int
    """Steps of the round at whose end it was sent."""


@dataclasses.dataclass
class PendingAverage:
    """The average of a round whose allreduce has started, not yet merged."""

    sent: Flats
    """This rank's values when the allreduce started."""
    totals: Totals
    steps_since: int = 0


class Fragment:
    """Averages variables over ranks, and merges the average with the steps that this rank has made meanwhile.

    All replicas share an anchor: the initial values plus what ranks have contributed so far. A rank contributes its
    displacement since its start, the values that the last merge has left here apart from later steps::

        start = merge_alpha * anchor + (1 - merge_alpha) * sent

    so that each step counts once, also if a rank keeps some of its own values. In the last round, ``start`` is the
    anchor on all ranks.

    Args:
        index: its place among the fragments, which names its messages.
    """

    def __init__(self, index: int, variables: FragmentVariables, config: LocalSGDConfig, collectives: Collectives):
        self.variables = [*variables.trained, *variables.followed]
        self._collectives = collectives
        self._in_background = config.in_background
        self._alpha = config.merge_alpha
        self._name = f"hvdtrain_average_{index}"
        self._flats = FlatVariables(variables.trained, variables.followed)
        num_trained = self._flats.ends[0]
        self._anchor_update = AnchorUpdate(make_outer_optimizer(config), num_trained)
        self._sum = DisplacementSum(collectives, config.sync_dtype, num_trained, self._name)
        self._anchor: Flats | None = None
        self._start: Flats | None = None
        self._velocity: Flats = ()
        self.pending: PendingAverage | None = None
        self._contribution: Contribution | None = None
        """The last one, until an average that has it is merged."""
        self._samples = self._missed_steps = 0
        self.steps = 0
        """Steps since this fragment was sent."""
        self._loss = 0.0
        self._num_finished = 0
        self.rounds = 0
        """Averages of this fragment that are part of the anchor."""

    @property
    def is_started(self) -> bool:
        return self._anchor is not None

    @property
    def is_finished(self) -> bool:
        """Whether all ranks had finished when this fragment was averaged."""
        return self._num_finished == self._collectives.size

    @property
    def is_averaged(self) -> bool:
        """Whether this rank has just merged the average, and kept nothing of its own."""
        return self._anchor is not None and self._start is self._anchor and self.steps == 0

    def begin(self) -> None:
        """Starts the first round."""
        self._anchor = self._start = self._flats.read()

    def record(self, samples: int, steps: int, loss: float) -> None:
        """Records local steps; see :meth:`ParameterAverager.step`."""
        self._samples += samples
        self.steps += steps
        self._loss += loss
        if self.pending is not None:
            self.pending.steps_since += steps

    def send(self, *, finished: bool, after: Totals | None, round_steps: int) -> int:
        """Starts the allreduce of this round; returns the bytes passed to it.

        Args:
            finished: this rank makes no more steps.
            after: an allreduce in the background that must be complete before this one starts.
            round_steps: see :class:`Contribution`.
        """
        assert self._start is not None
        assert self.pending is None
        sent = self._flats.read()
        self._require_own_finite(sent)
        message = self._message(sent, self._start, finished)
        samples = self._samples
        self._contribution = Contribution(sent, samples, self.steps, self._missed_steps, self._loss, round_steps)

        def reduce() -> Flats:
            if after is not None:
                after.result()
            return self._sum.sum(message, samples)

        self.pending = PendingAverage(
            sent, BackgroundTask(reduce, "average") if self._in_background else ImmediateTask(reduce)
        )
        # Reset only now: if a rank is lost meanwhile, the others average these steps again without it.
        self._samples = self.steps = self._missed_steps = 0
        self._loss = 0.0
        return self._sum.num_bytes(message)

    def _message(self, values: Flats, start: Flats, finished: bool) -> list[tf.Tensor]:
        """This rank's contribution: displacements times samples, and the facts."""
        pairs = enumerate(zip(values, start, strict=True))
        message = [self._samples * self._sum.displacement(i, value, begin) for i, (value, begin) in pairs]
        return [self._with_facts(message[0], finished), *message[1:]]

    def _with_facts(self, first: tf.Tensor, finished: bool) -> tf.Tensor:
        steps = self.steps - self._missed_steps
        return with_facts(first, samples=self._samples, steps=steps, loss=self._loss, finished=finished)

    def merge(self) -> np.ndarray:
        """Merges the pending average; steps made since it was sent are kept. Returns the facts."""
        assert self.pending is not None
        assert self._anchor is not None
        pending, totals = self.pending, self.pending.totals.result()
        self._require_finite(totals)
        anchor, self._velocity, facts = self._anchor_update.all(totals, self._anchor, self._velocity)
        self._num_finished = round(facts[FINISHED])
        start = anchor
        if self._alpha < 1 and not self.is_finished:
            start = [self._start_of(a, sent) for a, sent in zip(anchor, pending.sent, strict=True)]
        since = zip(start, self._flats.read(), pending.sent, strict=True) if pending.steps_since else ()
        self._flats.assign([begin + (now - sent) for begin, now, sent in since] or start)
        self._anchor, self._start, self.pending = anchor, start, None
        self._contribution = None
        self.rounds += 1
        self._sum.merged()
        return facts

    def _start_of(self, anchor: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
        return self._alpha * anchor + (1 - self._alpha) * sent

    def assign_averaged(self) -> None:
        """Sets the variables to what a last round would produce now, and changes nothing else. Collective."""
        assert self._anchor is not None
        assert self._start is not None
        facts = pending_facts = no_facts()
        # One tensor at a time: the averaged model is all that is needed at once.
        for i, (anchor, start) in enumerate(zip(self._anchor, self._start, strict=True)):
            now, velocity = self._flats.read_one(i), self._velocity[i : i + 1]
            if self.pending is not None:
                sent, total = self.pending.sent[i], self.pending.totals.result()[i]
                if i == 0:
                    total, pending_facts = split_facts(total)
                anchor, velocity = self._anchor_update.one(i, total, pending_facts, anchor, velocity)
                start = anchor if self._alpha == 1 else self._start_of(anchor, sent)
                now = start + (now - sent) if self.pending.steps_since else start
            message = self._samples * self._sum.displacement(i, now, start)
            if i == 0:
                message = self._with_facts(message, finished=False)
            (total,) = self._collectives.sum_tensors([message], f"{self._name}_view_{i}")
            if i == 0:
                total, facts = split_facts(total)
            self._flats.assign_one(i, self._anchor_update.one(i, total, facts, anchor, velocity)[0])

    def assign_anchor(self) -> None:
        """Sets the variables to the anchor."""
        assert self._anchor is not None
        self._flats.assign(self._anchor)

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint that is common to all ranks."""
        return {
            "anchor": None if self._anchor is None else arrays(self._anchor),
            "velocity": arrays(self._velocity),
            "rounds": self.rounds,
        }

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank to save in a checkpoint, except variables. Waits for a pending average."""
        pending = self.pending
        keeps_own = self._start is not None and self._start is not self._anchor
        return {
            "start": arrays(self._start or ()) if keeps_own else None,
            "samples": self._samples,
            "steps": self.steps,
            "loss": self._loss,
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
            rank_state: None if the number of ranks has changed: only the velocity is kept.
        """
        self._velocity, self.rounds = _tensors(state["velocity"]), state["rounds"]
        if rank_state is None or state["anchor"] is None:
            return
        self._anchor = self._start = _tensors(state["anchor"])
        if rank_state["start"] is not None:
            self._start = _tensors(rank_state["start"])
        self._samples, self.steps, self._loss = rank_state["samples"], rank_state["steps"], rank_state["loss"]
        self._sum.restore(rank_state["sum"])
        if (pending := rank_state["pending"]) is not None:
            totals, sent = _tensors(pending["totals"]), _tensors(pending["sent"])
            self.pending = PendingAverage(sent, ImmediateTask(lambda: totals), pending["steps_since"])

    def join(self, state: Mapping[str, Any], missed_steps: int) -> None:
        """Joins a round in progress from another rank's last average, after that rank has made ``missed_steps``."""
        mine = {**self.rank_state(), "start": None, "samples": 0, "steps": missed_steps, "loss": 0.0}
        self.restore(state, {**mine, "pending": None, "sum": None})
        self._missed_steps = missed_steps
        self.assign_anchor()

    # For ranks that change.

    def take_back(self) -> int:
        """Counts what this rank has sent again: the allreduce has failed. Returns the steps of its round."""
        assert self._contribution is not None
        taken, self.pending = self._contribution, None
        self._samples += taken.samples
        self.steps += taken.steps
        self._missed_steps += taken.missed_steps
        self._loss += taken.loss
        return taken.round_steps

    def adopt(self, state: Mapping[str, Any]) -> int:
        """Takes over the average to which this rank has contributed, from another rank, which has received it.

        Steps made since it was sent are kept. Returns the steps of the round at whose end it was sent.

        Args:
            state: what :meth:`state` returns on the other rank.
        """
        assert self._contribution is not None
        added, self._contribution = self._contribution, None
        self._anchor, self._velocity = _tensors(state["anchor"]), _tensors(state["velocity"])
        self.rounds = state["rounds"]
        self._start = self._anchor
        if self._alpha < 1:
            self._start = [self._start_of(a, sent) for a, sent in zip(self._anchor, added.sent, strict=True)]
        since = zip(self._start, self._flats.read(), added.sent, strict=True)
        self._flats.assign([begin + (now - sent) for begin, now, sent in since])
        self._samples -= added.samples
        self.steps -= added.steps
        self._missed_steps -= added.missed_steps
        self._loss -= added.loss
        self._sum.restore(None)
        return added.round_steps

    def _require_finite(self, totals: Flats) -> None:
        """Raises NonFiniteError on every rank if a replica would make all others non-finite."""
        if are_finite(totals):
            return
        if self._in_background:
            # Ranks merge at different steps and cannot gather anything here. Each has sent finite values.
            raise non_finite_error([], rank=self._collectives.rank)
        raise non_finite_error(self._collectives.allgather(non_finite_paths(self.variables)))

    def _require_own_finite(self, values: Flats) -> None:
        """Raises NonFiniteError on this rank alone, before others receive its values in the background."""
        if self._in_background and not are_finite(values):
            rank = self._collectives.rank
            raise non_finite_error([*[[]] * rank, non_finite_paths(self.variables)], rank=rank)


def _tensors(values: Any) -> Flats:
    return [tf.constant(each) for each in values]
