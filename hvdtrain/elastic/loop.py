"""The state of an elastic loop, and the function that calls the loop again each time that the ranks change."""

import atexit
import copy
import dataclasses
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.optimizers import build_optimizer, optimizer_variables
from hvdtrain.distributed.runtime import Topology
from hvdtrain.errors import HvdtrainError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch, join_elastic_job
from hvdtrain.fault_tolerance.elastic.rejoin import MembershipChange, is_over, rejoin
from hvdtrain.fault_tolerance.shutdown import end_job
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.optim.pipeline import in_scope, pipelines_of
from hvdtrain.system import environment, versions

_watch: ElasticWatch | None = None


class Ranks(NamedTuple):
    """The ranks that train together now."""

    rank: int
    """This rank's number, from 0."""
    size: int
    """The number of ranks."""


def init(
    *, seed: int | None = None, threads: int | None = None, deterministic: bool = False, stall_timeout_s: float = 600.0
) -> Topology:
    """Does what :func:`hvdtrain.init` does, also in a process of an elastic job. Call it first.

    Args:
        seed: for Keras, NumPy and Python, the same on every rank; None: no seed is set.
        threads: compute threads of this rank; None: a fair share of the host's cores.
        deterministic: make runs bit-identical, at the cost of speed.
        stall_timeout_s: how long a rank may be silent, or keep the others waiting, before it is removed; 0: for ever.

    Raises:
        SystemExit: the job has ended already, or has another program, arguments or versions; after a message.
    """
    global _watch
    if environment.elastic_job() is not None and _watch is None:
        try:
            _watch = join_elastic_job(_facts(deterministic, stall_timeout_s), stall_timeout_s)
        except HvdtrainError as error:
            end_job(error, None)
        atexit.register(_watch.close, ends_process=True)
    return runtime.init(seed=seed, threads=threads, deterministic=deterministic)


def _facts(deterministic: bool, stall_timeout_s: float) -> dict[str, Any]:
    program = Path(sys.argv[0])
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:12] if program.is_file() else ""
    facts = {"the program": digest, "its arguments": sys.argv[1:], "deterministic": deterministic}
    return {**facts, "stall_timeout_s": stall_timeout_s, **versions.versions(), "hvdtrain": versions.code_digest()}


class State:
    """What the ranks of a loop have in common: a model with its optimizer, and values such as the number of steps.

    The values are attributes: ``state = State(model, step=0)``, ``state.step += 1``. They must be picklable.

    Args:
        model: built and compiled with a distributed optimizer.
        variables: others that training changes, equally on all ranks.

    Raises:
        UsageError: the model is not built or not compiled, or a value has the name of a method.
    """

    def __init__(self, model: keras.Model, *, variables: tuple[Any, ...] = (), **values: Any):
        if taken := sorted(set(values) & set(dir(State))):
            raise UsageError(f"the names of values must not be those of methods. Received: {', '.join(taken)}")
        if not replica_consistency.is_built(model) or model.optimizer is None:
            raise UsageError(
                f"model {model.name!r} must be built and compiled. Give its first layer an Input, and call "
                "model.compile(optimizer=hvdtrain.DistributedOptimizer(…))."
            )
        build_optimizer(model)
        if _watch is not None and compression_memories(model):
            exclusions.require_compatible(exclusions.facts_from(exclusions.ELASTIC_LOOP, exclusions.COMPRESSION))
        self._model = model
        self._names = tuple(values)
        self._num_commits = 0
        self._has_state = True
        self._shared = [each.value for each in (*model.weights, *optimizer_variables(model))] + [
            getattr(each, "value", each) if isinstance(each, keras.Variable) else each for each in variables
        ]
        own = [each.value for each in (*model.metrics_variables, *replica_consistency.random_streams(model))]
        self._copies = [(each, tf.Variable(each, trainable=False)) for each in (*self._shared, *own)]
        self._kept: dict[str, Any] = {}
        vars(self).update(values)
        self._save()

    def commit(self) -> None:
        """Keeps this state: from here, other ranks continue. Ranks may change here, and only here, as a plan.

        All ranks must call it at the same points of the loop, for instance after each step. A loss in between repeats
        what has happened since. It costs a copy of all variables.

        Raises:
            Exception: the ranks change, or the job stops; do not catch it.
        """
        self._num_commits += 1
        self._save()
        if _watch is None:
            return
        _watch.heartbeat("training", self._num_commits)
        if _watch.check():
            if _watch.coordinator.must_hold:
                raise MembershipChange
            raise StoppedEarly(f"stopped after {self._num_commits} commits ({_watch.stop_reason}).")

    def _save(self) -> None:
        for variable, kept in self._copies:
            kept.assign(variable)
        self._kept = copy.deepcopy({name: getattr(self, name) for name in self._names})

    def _restore(self) -> None:
        for variable, kept in self._copies:
            variable.assign(kept)
        vars(self).update(copy.deepcopy(self._kept))

    def _settle(self) -> None:
        """Makes the state of all ranks the last commit of the furthest one."""
        self._restore()
        collectives = runtime.current().collectives
        places = collectives.allgather((self._has_state, self._num_commits))
        source = places.index(max(places))
        if not places[source][0]:
            raise HvdtrainError(
                "the state of the loop was lost with the ranks that had it. Restart the job from what it has saved."
            )
        is_source = collectives.rank == source
        kept = collectives.allgather(self._kept if is_source else None)[source]
        if any(place != places[source] for place in places):
            self._has_state = is_source  # Until all of it has arrived.
            collectives.broadcast(self._shared, root_rank=source)
        self._num_commits, self._has_state = places[source][1], True
        vars(self).update(copy.deepcopy(kept))
        self._save()


def run(
    train: Callable[[Ranks], None],
    state: State,
    *,
    warm_up: Callable[[], object] = lambda: None,
    on_stop: Callable[[], object] = lambda: None,
) -> None:
    """Calls ``train`` until it returns, again with other ranks each time that they change.

    All ranks start with rank 0's state. In a job whose ranks do not change, as of horovodrun, ``train`` is called once.

    Args:
        train: receives the ranks, trains from ``state`` on and calls ``state.commit()``. It divides the data by the
            ranks that it receives, and must not catch exceptions of a step.
        warm_up: called in a process that joins, before the others pause for it: make a step on made-up data here, so
            that it is compiled. What it changes is undone.
        on_stop: called on rank 0 if the job is stopped by SIGTERM, with ``state`` as of the last commit: save it here.
            The process ends with exit code 75.
    """
    collectives = runtime.current().collectives
    if _watch is None or not isinstance(collectives, ElasticCollectives):
        _share_start(state)
        train(Ranks(collectives.rank, collectives.size))
        return
    # Replicas are equal. Comparing them in the first step would wait for newcomers, which make theirs alone.
    pipelines = [(leaf, dataclasses.replace(pipeline, start=None)) for leaf, pipeline in pipelines_of(state._model)]
    try:
        with in_scope(pipelines):
            _run_elastic(train, state, warm_up, _watch, collectives)
    except Exception as error:
        if isinstance(error, StoppedEarly) and collectives.rank == 0:
            on_stop()
        end_job(error, collectives, state._num_commits, _watch)


def _run_elastic(
    train: Callable[[Ranks], None],
    state: State,
    warm_up: Callable[[], object],
    watch: ElasticWatch,
    collectives: ElasticCollectives,
) -> None:
    coordinator = watch.coordinator

    def join_others() -> None:
        rejoin(coordinator, collectives, settle=state._settle, on_leave=lambda: None)

    if coordinator.must_warm_up:
        warm_up()
        state._restore()
        state._has_state = False
        # Streams of its own, as ranks have from the start.
        for stream in [*replica_consistency.random_streams(state._model), replica_consistency.global_stream()]:
            stream.assign(replica_consistency.own_random_stream(stream.numpy(), coordinator.number))
        coordinator.cut_with(collectives.cut)
        coordinator.is_ready()
        join_others()
    else:
        _share_start(state)
        coordinator.cut_with(collectives.cut)
    while True:
        try:
            train(Ranks(collectives.rank, collectives.size))
            return
        except Exception as error:
            if not is_over(error, coordinator):
                raise
        join_others()


def _share_start(state: State) -> None:
    replica_consistency.broadcast(state._model)
    state._save()
