"""Replicas that train alone, and meet: parameters averaged over ranks, round after round."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import replicas, runtime
from hvdtrain.averaging import parts
from hvdtrain.averaging.background import Background, Now
from hvdtrain.averaging.flat_variables import FlatVariables
from hvdtrain.averaging.options import LocalTraining
from hvdtrain.averaging.outer import Flats, make_outer
from hvdtrain.averaging.period import Period
from hvdtrain.collectives import Collectives
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.optimizer import distribution_of, is_distributed

# What ranks tell each other beside their displacements, at the end of the first message.
_SAMPLES, _STEPS, _LOSS, _FINISHED, _NUM_FACTS = 0, 1, 2, 3, 4


@dataclasses.dataclass
class _OnItsWay:
    """A round's displacements, sent and not yet merged."""

    sent: Flats
    """This rank's values when they were sent."""
    totals: Background[Flats] | Now[Flats]
    """Over all ranks: displacements times samples, and the facts."""
    steps_since: int = 0


class ParameterAverager:
    """Averages a model's parameters over ranks after every ``every`` steps that each of them makes alone.

    ::

        hvdtrain.broadcast(model)
        averager = hvdtrain.ParameterAverager(model, every=16)
        for x, y in dataset:
            train_step(x, y)                 # with the plain optimizer
            averager.step(samples=len(x))
        averager.finish()

    All float variables of the model and the moving averages of its weights are averaged, and the optimizer's
    own with ``slots='average'``; what travels is how far each has moved since the round before, times the
    samples that the rank has seen. Rounds need not be equally long: a rank that has finished takes part
    with nothing of its own until all have.

    Args:
        model: built, with its optimizer, which must not be distributed; the same values on every rank, but for
            statistics, which are made equal.
        options: or the arguments of :class:`~hvdtrain.averaging.LocalTraining` by name.
        deterministic: an average that is on its way arrives at the end of the next round, never before.
        starts: False where :meth:`start` is called later.
        collectives: what to average with (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: an option breaks its rule; there is one rank only and ``wait_free``.
    """

    def __init__(
        self,
        model: keras.Model,
        options: LocalTraining | None = None,
        *,
        deterministic: bool = False,
        starts: bool = True,
        collectives: Collectives | None = None,
        **more: Any,
    ):
        self._collectives = collectives or runtime.current().collectives
        self._options = options = options or LocalTraining(**more)
        if options.wait_free and self._collectives.size == 1:
            raise UsageError("wait_free needs ranks that could wait for each other. Received: 1 rank. Leave it out.")
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._model = model
        self._deterministic = deterministic
        self._trained = FlatVariables(parts.trained(model))
        followed = parts.followed(model)
        if options.slots == "average":
            followed += parts.slots(model)
        self._followed = FlatVariables(followed)
        self._variables = parts.trained(model) + followed
        self._outer = make_outer(options)
        self._period = Period(options)
        self._anchor: Flats | None = None
        self._velocity: Flats = ()
        self._pending: _OnItsWay | None = None
        self._closing: Background[Flats] | None = None
        self._samples = self._steps = 0
        self._loss = 0.0
        self.rounds = 0
        """Averages that have arrived."""
        self.bytes_reduced = 0
        """What this rank has handed to the allreduce."""
        self.late_steps = 0
        """How many steps averages were late, all together."""
        self.most_late_steps = 0
        """How many steps the latest of them was late."""
        self.total_steps = 0
        """Steps of all ranks, in all rounds that are complete."""
        self.total_samples = 0
        """Samples of all ranks, likewise."""
        self._num_finished = 0
        self._reducing_s = self._waited_s = 0.0
        if starts:
            self.start()

    @property
    def every(self) -> int:
        """Steps to the end of a round."""
        return self._period.steps

    @property
    def steps_to_round_end(self) -> int:
        """Steps that can be made before parameters are due to be averaged; 1 where that is past."""
        return max(1, self.every - self._steps)

    def start(self) -> None:
        """Begins the first round, before any step is made; every rank has to call it.

        Raises:
            UsageError: the optimizer is distributed.
            DisagreementError: ranks differ in options or model.
        """
        optimizer = self._model.optimizer
        if self._anchor is None:
            if is_distributed(optimizer) and distribution_of(optimizer).collectives is self._collectives:
                raise UsageError(
                    "an optimizer that averages gradients over all ranks leaves nothing to average. Received: a "
                    "distributed optimizer. Give the model its plain one."
                )
            facts = {**dataclasses.asdict(self._options), **replicas.structure(self._model)}
            replicas.require_agreement("options and model to average", facts, self._collectives)
            replicas.share_statistics(self._model, self._collectives)
            self._anchor = self._read()

    def step(self, samples: int = 1, *, steps: int = 1, loss: float = 0.0, stop: bool = False) -> bool:
        """Tells that this rank has made steps; averages where that is due.

        Args:
            samples: seen in these steps; the average weighs by them.
            steps: how many; not more than :attr:`steps_to_round_end`, or the round is longer.
            loss: the sum of the steps' losses, for ``schedule='adacomm'``.
            stop: end the round now, as far as this rank is concerned (``wait_free``).

        Returns:
            Whether a round has ended.
        """
        self._samples += samples
        self._steps += steps
        self._loss += loss
        if self._pending is not None:
            self._pending.steps_since += steps
            if not self._deterministic and self._pending.totals.is_done:
                self._merge()
        if self._options.wait_free:
            return self._step_wait_free(stop)
        if self._steps < self.every:
            return False
        self._end_round()
        return True

    def _step_wait_free(self, stop: bool) -> bool:
        if self._closing is None and (stop or self._steps >= self.every):
            self._closing = self._is_ready()
        if self._closing is None or not self._closing.is_done:
            return False
        self._closing.result()
        self._closing = None
        self._end_round()
        return True

    def _is_ready(self) -> Background[Flats]:
        """Says that this rank has made its steps; complete when every rank has said so, and nobody waits for it."""
        return Background(lambda: self._collectives.sum_tensors([tf.zeros([1])], "hvdtrain_round"), "round")

    def finish(self) -> None:
        """The last average, which stays; waits until every rank has called it."""
        while self._num_finished < self._collectives.size:
            if self._options.wait_free:
                (self._closing or self._is_ready()).result()
                self._closing = None
            self._end_round(finished=True)
            if self._pending is not None:
                self._merge()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model is inside what :meth:`finish` would leave, and this rank's own again after.

        Every rank has to call it. What somebody has put there meanwhile stays.
        """
        if self.is_level:
            yield
            return
        assert self._anchor is not None
        anchor, velocity, now = self._anchor, self._velocity, self._read()
        if self._pending is not None:
            anchor, velocity, now, _ = self._merged(self._pending)
        totals = self._collectives.sum_tensors(self._message(now, anchor, finished=False), "hvdtrain_view")
        anchor, _, _ = self._moved(totals, anchor, velocity)
        own = [(variable, variable.numpy()) for variable in self._variables]
        self._assign(anchor)
        with replicas.returned(own):
            yield

    def summary(self) -> dict[str, Any]:
        """What a run's ``summary.json`` tells of the averaging."""
        samples = {"samples": self.total_samples} if self._options.wait_free else {}
        return {
            **samples,
            "averaging_rounds": self.rounds,
            "average_late_steps": {"mean": self.late_steps / max(1, self.rounds), "max": self.most_late_steps},
            "average_hidden_share": 1 - self._waited_s / self._reducing_s if self._reducing_s else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of all ranks together."""
        return {
            "anchor": None if self._anchor is None else [each.numpy() for each in self._anchor],
            "velocity": [each.numpy() for each in self._velocity],
            "period": self._period.state(),
            "rounds": self.rounds,
            "total_steps": self.total_steps,
            "total_samples": self.total_samples,
        }

    def rank_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this rank, beside its variables; waits for an average that is on its way."""
        pending = self._pending
        return {
            "samples": self._samples,
            "steps": self._steps,
            "loss": self._loss,
            "late_steps": self.late_steps,
            "most_late_steps": self.most_late_steps,
            "bytes_reduced": self.bytes_reduced,
            "pending": None
            if pending is None
            else {
                "sent": [each.numpy() for each in pending.sent],
                "totals": [each.numpy() for each in pending.totals.result()],
                "steps_since": pending.steps_since,
            },
        }

    def restore(self, state: Mapping[str, Any], rank_state: Mapping[str, Any] | None) -> None:
        """Takes over what :meth:`state` and :meth:`rank_state` gave.

        Args:
            rank_state: None on another number of ranks: a round begins with the averaged model.
        """
        self._velocity = [tf.constant(each) for each in state["velocity"]]
        self._period.restore(state["period"])
        self.rounds = state["rounds"]
        self.total_steps, self.total_samples = state["total_steps"], state["total_samples"]
        if rank_state is None or state["anchor"] is None:
            return
        self._anchor = [tf.constant(each) for each in state["anchor"]]
        self._samples, self._steps, self._loss = rank_state["samples"], rank_state["steps"], rank_state["loss"]
        self.late_steps, self.most_late_steps = rank_state["late_steps"], rank_state["most_late_steps"]
        self.bytes_reduced = rank_state["bytes_reduced"]
        if (pending := rank_state["pending"]) is not None:
            totals = [tf.constant(each) for each in pending["totals"]]
            sent = [tf.constant(each) for each in pending["sent"]]
            self._pending = _OnItsWay(sent, Now(lambda: totals), pending["steps_since"])

    # A round.

    def _end_round(self, finished: bool = False) -> None:
        if self._pending is not None:
            self._merge()
        self._send(finished)
        assert self._pending is not None
        arrives_at_once = self._pending.totals.is_done and not self._deterministic
        # Without waiting, ranks count how far all have come by the averages that have arrived: alike on every rank.
        if not self._options.in_background or (arrives_at_once and not self._options.wait_free):
            self._merge()

    def _send(self, finished: bool) -> None:
        assert self._anchor is not None
        sent = self._read()
        message = self._message(sent, self._anchor, finished)
        self.bytes_reduced += sum(each.shape.num_elements() * each.dtype.size for each in message)
        self._samples = self._steps = 0
        self._loss = 0.0

        def reduce() -> Flats:
            return self._collectives.sum_tensors(message, "hvdtrain_average")

        self._pending = _OnItsWay(sent, Background(reduce, "average") if self._options.in_background else Now(reduce))

    def _message(self, values: Flats, anchor: Flats, finished: bool) -> list[tf.Tensor]:
        """What this rank adds to the average: displacements times samples, and the facts."""
        facts = np.zeros(_NUM_FACTS)
        facts[[_SAMPLES, _STEPS, _LOSS, _FINISHED]] = self._samples, self._steps, self._loss, finished
        message = [self._samples * (value - start) for value, start in zip(values, anchor, strict=True)]
        message[0] = tf.concat([message[0], tf.constant(facts, message[0].dtype)], 0)
        return message

    def _moved(self, totals: Flats, anchor: Flats, velocity: Flats) -> tuple[Flats, Flats, np.ndarray]:
        """The anchor and velocity that follow from the sums over ranks, and the facts."""
        facts = totals[0][-_NUM_FACTS:].numpy().astype(float)
        if facts[_SAMPLES] > 0:
            totals = [totals[0][:-_NUM_FACTS], *totals[1:]]
            mean = [total / tf.cast(facts[_SAMPLES], total.dtype) for total in totals]
            num = self._trained.num_tensors
            moves, velocity = self._outer.move(mean[:num], velocity)
            anchor = [start + move for start, move in zip(anchor, [*moves, *mean[num:]], strict=True)]
        return anchor, velocity, facts

    def _merged(self, pending: _OnItsWay) -> tuple[Flats, Flats, Flats, np.ndarray]:
        """Anchor, velocity, this rank's values and the facts with an average in its place; waits for it if need be."""
        assert self._anchor is not None
        anchor, velocity, facts = self._moved(pending.totals.result(), self._anchor, self._velocity)
        values = anchor
        if pending.steps_since:
            values = [a + (now - sent) for a, now, sent in zip(anchor, self._read(), pending.sent, strict=True)]
        return anchor, velocity, values, facts

    def _merge(self) -> None:
        """Puts an average in its place; steps made meanwhile stay made."""
        assert self._pending is not None
        totals = self._pending.totals
        began_s = time.perf_counter()
        totals.result()
        self._waited_s += totals.seconds if isinstance(totals, Now) else time.perf_counter() - began_s
        self._reducing_s += totals.seconds
        self._require_finite(totals.result())
        self._anchor, self._velocity, values, facts = self._merged(self._pending)
        self._assign(values)
        self.rounds += 1
        self.late_steps += self._pending.steps_since
        self.most_late_steps = max(self.most_late_steps, self._pending.steps_since)
        self._pending = None
        self.total_steps += round(facts[_STEPS])
        self.total_samples += round(facts[_SAMPLES])
        self._num_finished = round(facts[_FINISHED])
        self._period.round_ended(facts[_LOSS], round(facts[_STEPS]))

    def _require_finite(self, totals: Flats) -> None:
        """Raises NonFiniteError, on every rank, where a replica would spoil all others."""
        if all(bool(tf.reduce_all(tf.math.is_finite(total))) for total in totals):
            return
        spoiled = [variable.path for variable in self._variables if not np.all(np.isfinite(variable.numpy()))]
        told = [
            f"{len(paths)} variable(s) of rank {rank}, {paths[0]!r} first"
            for rank, paths in enumerate(self._collectives.allgather(spoiled))
            if paths
        ]
        raise NonFiniteError(
            f"parameters must be finite to be averaged. Received: {'; '.join(told) or 'an overflow of their sum'}. "
            "Lower the learning rate, or clip gradients (--clip-norm)."
        )

    @property
    def is_level(self) -> bool:
        """Whether all replicas are known to be equal: an average has just been put in place on every rank."""
        if self._options.in_background and self._num_finished < self._collectives.size:
            return False  # It may have arrived here, and not yet at another.
        return self._anchor is not None and self._steps == 0

    def _read(self) -> Flats:
        return [*self._trained.read(), *self._followed.read()]

    def _assign(self, values: Flats) -> None:
        self._trained.assign(values[: self._trained.num_tensors])
        self._followed.assign(values[self._trained.num_tensors :])
