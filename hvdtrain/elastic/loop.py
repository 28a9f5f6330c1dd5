"""The state of an elastic loop, and the function that calls the loop again whenever the ranks change."""

import atexit
import copy
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.optimizers import build_optimizer, optimizer_variables
from hvdtrain.distributed.runtime import OnUnequal, Topology
from hvdtrain.errors import HvdtrainError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch, join_elastic_job
from hvdtrain.fault_tolerance.shutdown import end_job
from hvdtrain.optim.distributed_optimizer import compression_memories
from hvdtrain.optim.pipeline import in_scope, pipelines_of
from hvdtrain.system import environment, versions
from hvdtrain.training.equality.fit import restart_checks
from hvdtrain.training.joining import Joining, MembershipChange, without_comparison

_watch: ElasticWatch | None = None


class Ranks(NamedTuple):
    """The ranks that train together now."""

    rank: int
    """This rank's number, from 0."""
    size: int
    """The number of ranks."""


def init(
    *,
    seed: int | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    stall_timeout_s: float = 600.0,
    on_unequal: OnUnequal = "stop",
) -> Topology:
    """Does what :func:`hvdtrain.init` does, also in a process of an elastic job. Call it first.

    Args:
        seed: for Keras, NumPy and Python, the same on every rank; None: no seed is set.
        threads: compute threads of this rank; None: a fair share of the host's cores.
        deterministic: make runs bit-identical, at the cost of speed.
        stall_timeout_s: how long a rank may be silent, or keep the others waiting, before it is removed; 0: forever.
        on_unequal: as for :func:`hvdtrain.init`.

    Raises:
        SystemExit: the job has ended already, or has another program, arguments or versions; after a message.
    """
    global _watch
    if environment.elastic_job() is not None and _watch is None:
        try:
            _watch = join_elastic_job(_facts(deterministic, stall_timeout_s, on_unequal), stall_timeout_s)
        except HvdtrainError as error:
            end_job(error, None)
        atexit.register(_watch.close, ends_process=True)
    return runtime.init(seed=seed, threads=threads, deterministic=deterministic, on_unequal=on_unequal)


def _facts(deterministic: bool, stall_timeout_s: float, on_unequal: OnUnequal) -> dict[str, Any]:
    program = Path(sys.argv[0])
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:12] if program.is_file() else ""
    facts = {"the program": digest, "its arguments": sys.argv[1:], "deterministic": deterministic}
    facts.update(stall_timeout_s=stall_timeout_s, on_unequal=on_unequal)
    return {**facts, **versions.versions(), "hvdtrain": versions.code_digest()}


class State:
    """What the ranks of a loop have in common: a model with its optimizer, and values such as the number of steps.

    The values are attributes: ``state = State(model, step=0)``, ``state.step += 1``. They must be picklable.

    Args:
        model: built and compiled with a distributed optimizer.
        variables: other variables that training changes, equally on all ranks.

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
        self._shared = [each.value for each in (*model.weights, *optimizer_variables(model))] + [
            getattr(each, "value", each) if isinstance(each, keras.Variable) else each for each in variables
        ]
        own = [each.value for each in (*model.metrics_variables, *replica_consistency.random_streams(model))]
        self._copies = [(each, tf.Variable(each, trainable=False)) for each in (*self._shared, *own)]
        self._kept: dict[str, Any] = {}
        vars(self).update(values)
        self._save()

    def commit(self) -> None:
        """Keeps this state, from which other ranks can continue. Planned membership changes happen only here.

        All ranks must call it at the same points of the loop, for instance after each step. After a loss, what has
        happened since the last commit is repeated. It costs a copy of all variables.

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


class _JoinedState:
    """A state as the members of an elastic job take it over; see :class:`LoopState`."""

    remedy = "Restart the job from what it has saved."

    def __init__(self, state: State, collectives: ElasticCollectives, warm_up: Callable[[], object]):
        self._state = state
        self._collectives = collectives
        self._warm_up = warm_up

    @property
    def model(self) -> keras.Model:
        return self._state._model

    def warm_up(self) -> None:
        self._warm_up()
        self._state._restore()

    def undo(self) -> None:
        self._state._restore()

    def place(self, *, has_state: bool) -> tuple[Any, ...]:
        return has_state, self._state._num_commits

    def shared(self) -> Any:
        return self._state._kept

    def keeps_own(self, places: Sequence[tuple[Any, ...]], own: int, source: int) -> bool:
        return len(set(places)) == 1

    def take_over(self, places: Sequence[tuple[Any, ...]], source: int, shared: Any) -> None:
        if len(set(places)) > 1:
            self._collectives.broadcast(self._state._shared, root_rank=source)
        _, self._state._num_commits = places[source]

    def resume(self, shared: Any) -> None:
        restart_checks()
        vars(self._state).update(copy.deepcopy(shared))
        self._state._save()


def run(
    train: Callable[[Ranks], None],
    state: State,
    *,
    warm_up: Callable[[], object] = lambda: None,
    on_stop: Callable[[], object] = lambda: None,
) -> None:
    """Calls ``train`` until it returns, and again whenever the ranks change.

    All ranks start with rank 0's state. In a job whose ranks do not change, as under horovodrun, ``train`` is called
    once.

    Args:
        train: receives the ranks, trains from ``state`` on and calls ``state.commit()``. It divides the data by the
            ranks that it receives, and must not catch exceptions of a step.
        warm_up: called in a process that joins, before the others pause for it: make a step on made-up data here, so
            that it is compiled. Its changes are undone.
        on_stop: called on rank 0 if the job is stopped by SIGTERM, with ``state`` as of the last commit: save it here.
            The process ends with exit code 75.
    """
    collectives = runtime.current().collectives
    if _watch is None or not isinstance(collectives, ElasticCollectives):
        _share_start(state)
        train(Ranks(collectives.rank, collectives.size))
        return
    joining = Joining(_JoinedState(state, collectives, warm_up), _watch.coordinator, collectives)
    try:
        with in_scope(without_comparison(pipelines_of(state._model))):
            _run_elastic(train, state, joining, collectives)
    except Exception as error:
        if isinstance(error, StoppedEarly) and collectives.rank == 0:
            on_stop()
        end_job(error, collectives, state._num_commits, _watch)


def _run_elastic(
    train: Callable[[Ranks], None], state: State, joining: Joining, collectives: ElasticCollectives
) -> None:
    if not joining.is_newcomer:
        _share_start(state)
    joining.start()
    if joining.is_newcomer:
        joining.rejoin()
    while True:
        try:
            train(Ranks(collectives.rank, collectives.size))
            return
        except Exception as error:
            if not joining.is_over(error):
                raise
        joining.rejoin()


def _share_start(state: State) -> None:
    replica_consistency.broadcast(state._model)
    state._save()
