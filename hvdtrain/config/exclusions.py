"""What excludes what: facts about a job, and the rules about pairs of them, each worded once.

A rule is checked as soon as its facts are known: those about options when a configuration that has them is made, others
when model, data and ranks are known. ``docs/combinations.md`` is written from :data:`RULES`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.config.wording import ANY, option
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Option:
    """An option that is set to one value, or to any value but its default."""

    name: str
    value: Any = ANY

    def holds(self, value: Any, default: Any) -> bool:
        return bool(value != default if self.value is ANY else value == self.value)

    def __str__(self) -> str:
        return option(self.name, self.value)


@dataclasses.dataclass(frozen=True)
class Condition:
    """A property of a job that is not an option."""

    text: str

    def __str__(self) -> str:
        return self.text


Fact = Option | Condition

# Training.
LOCAL = Option("mode", "local")
STEPS, EPOCHS = Option("steps"), Option("epochs")
ACCUMULATION = Option("gradient_accumulation_steps")
SEVERAL_STEPS = Option("steps_per_execution")
JIT_COMPILE = Option("jit_compile", True)
SYNC_BATCHNORM = Option("sync_batchnorm", True)
GLOBAL_BATCH_SIZE = Option("global_batch_size")
RESCALE = Option("rescale", True)
DROPPED_REMAINDER = Option("remainder", "drop")
SKIPPED_STEPS = Option("on_nan", "skip")
BAD_SAMPLES = Option("bad_samples")
AUTOTUNE = Option("autotune", True)
DETERMINISTIC = Option("deterministic", True)
# Stragglers.
BALANCE, SHARES = Option("balance", True), Option("shares")
BALANCE_EVERY, MAX_BATCH_SIZE = Option("balance_every"), Option("max_batch_size")
QUORUM = Option("quorum")
STEP_DEADLINE, STEP_GRACE = Option("step_deadline"), Option("step_grace")
MAX_MISSED_UPDATES, RECORD, REPLAY = Option("max_missed_updates"), Option("record"), Option("replay")
# Local SGD.
SYNC_EVERY, ADACOMM = Option("sync_every"), Option("sync_schedule", "adacomm")
AVERAGED_SLOTS, NESTEROV = Option("average_slots", "average"), Option("outer", "nesterov")
OUTER_LEARNING_RATE, OUTER_MOMENTUM = Option("outer_learning_rate"), Option("outer_momentum")
OVERLAP, WAIT_FREE = Option("overlap", True), Option("wait_free", True)
ROUND_QUORUM, ROUND_GRACE = Option("round_quorum"), Option("round_grace")
FRAGMENTS, FRAGMENT_DELAY, MERGE_ALPHA = Option("fragments"), Option("fragment_delay"), Option("merge_alpha")
SYNC_DTYPE, SYNC_STEPS_FIRST = Option("sync_dtype"), Option("sync_steps_first")
ACROSS_HOSTS = Option("average_across", "host")
# The reduction of gradients.
SUM, ADASUM = Option("op", "sum"), Option("op", "adasum")
COMPRESSION, COMPRESSION_AFTER = Option("compression"), Option("compression_after")
GROUPS = Option("groups")
SHARDED_OPTIMIZER = Option("shard_optimizer", True)
# Optimizer and learning rate.
CLIP_NORM, CLIP_VALUE = Option("clip_norm"), Option("clip_value")
EMA, EMA_RAMP = Option("ema"), Option("ema_ramp", True)
LR_SCALING, LR_DECAY, WARMUP_STEPS = Option("lr_scaling"), Option("lr_decay"), Option("warmup_steps")
LR_DECAY_STEPS, LR_DECAY_EPOCHS = Option("lr_decay_steps"), Option("lr_decay_epochs")
# Other commands.
WATCH, CHECKPOINT = Option("watch", True), Option("checkpoint")
MPI, GLOO = Option("mpi", True), Option("gloo", True)
HOSTS, HOSTFILE = Option("hosts"), Option("hostfile")
LINK_MBIT, LINK_LATENCY_MS = Option("link_mbit"), Option("link_latency_ms")
WITHIN_MBIT, WITHIN_LATENCY_MS = Option("within_mbit"), Option("within_latency_ms")
BENCH = Condition("bench")
# What model, optimizer, data and ranks are.
ELASTIC = Condition("an elastic job")
ELASTIC_LOOP = Condition("a loop with hvdtrain.elastic.State")
SYNCHRONIZED_LAYERS = Condition("BatchNormalization over all ranks")
SEVERAL_OPTIMIZERS = Condition("a model with several optimizers")
EAGER_MODEL = Condition("a model with run_eagerly=True")
SCALAR_LOSS = Condition("a loss that returns one number for a batch")
COUNTED_LOSS = Condition("a loss that divides by the number of unmasked positions or by a sum of weights")
GATHERED_SAMPLES = Condition("a step that gathers the samples of all ranks")
USED_GRADIENTS = Condition("a train_step that uses gradients before it applies them")
MEAN_LOSS = Condition("a loss that is a mean over samples")
STREAM = Condition("a tf.data.Dataset")
LOCAL_LAYERS = Condition("an optimizer with local_layers")
GLOBAL_CLIP_NORM = Condition("an optimizer with global_clipnorm")
SHARDED_TABLE = Condition("a sharded table (hvdtrain.layers.ShardedEmbedding)")
TRAINER = Condition("a trainer")
SAVED_BY_KERAS = Condition("Keras' callbacks that save the model")
SWAPPED_EMA = Condition("the callback SwapEMAWeights")


@dataclasses.dataclass(frozen=True)
class Excludes:
    """Facts that exclude each other."""

    facts: tuple[Fact, ...]
    why: str
    instead: str = ""

    def is_broken(self, facts: Mapping[Fact, str]) -> bool:
        return all(fact in facts for fact in self.facts)

    def message(self, facts: Mapping[Fact, str]) -> str:
        one, *others = self.facts
        remedy = f", or {self.instead}" if self.instead else ""
        received = " and ".join(facts[fact] for fact in self.facts)
        return (
            f"{one} excludes {' with '.join(map(str, others))}: {self.why}. Received: {received}. Leave one of them "
            f"out{remedy}."
        )


@dataclasses.dataclass(frozen=True)
class Needs:
    """An option that only has an effect together with another."""

    option: Option
    other: Option
    alternatives: tuple[Option, ...] = ()
    """Options that do as well as ``other``."""

    @property
    def others(self) -> tuple[Option, ...]:
        """The options of which one suffices."""
        return (self.other, *self.alternatives)

    @property
    def facts(self) -> tuple[Fact, ...]:
        return (self.option, *self.others)

    def is_broken(self, facts: Mapping[Fact, str]) -> bool:
        return self.option in facts and not any(each in facts for each in self.others)

    def message(self, facts: Mapping[Fact, str]) -> str:
        others = " or ".join(map(str, self.others))
        return (
            f"{option(self.option.name)} needs {others}. Received: {facts[self.option]} without it. Set {others}, or "
            f"leave {option(self.option.name)} out."
        )


def _excludes(one: Fact, *others: Fact, why: str, instead: str = "") -> list[Excludes]:
    return [Excludes((one, other), why, instead) for other in others]


_EVERY_STEP = "statistics over all ranks need all of them in every step"
_COMMON_STEPS = "samples can only be divided in steps that all ranks make together"
_SEPARATE = "in local SGD, each rank makes its own updates"
_NO_CHANGE = "the ranks of an elastic job change while it trains"

RULES: Sequence[Excludes | Needs] = (
    *_excludes(STEPS, EPOCHS, why="both say how long a run is"),
    # Local SGD.
    *_excludes(
        LOCAL,
        ACCUMULATION,
        why="accumulation saves reductions, and local SGD makes few of them anyway",
        instead="use larger batches",
    ),
    *_excludes(LOCAL, SYNC_BATCHNORM, SYNCHRONIZED_LAYERS, why=_EVERY_STEP),
    *_excludes(LOCAL, BALANCE, SHARES, why=_COMMON_STEPS),
    *_excludes(LOCAL, SUM, ADASUM, SHARDED_OPTIMIZER, why=_SEPARATE),
    *(
        Needs(each, LOCAL)
        for each in (
            *(SYNC_EVERY, ADACOMM, AVERAGED_SLOTS, NESTEROV, OUTER_LEARNING_RATE, OUTER_MOMENTUM, OVERLAP, WAIT_FREE),
            *(FRAGMENTS, FRAGMENT_DELAY, MERGE_ALPHA, SYNC_DTYPE, SYNC_STEPS_FIRST, ACROSS_HOSTS),
        )
    ),
    Needs(OUTER_LEARNING_RATE, NESTEROV),
    Needs(OUTER_MOMENTUM, NESTEROV),
    *_excludes(OVERLAP, AVERAGED_SLOTS, why="a late average could make Adam's second moments negative"),
    *_excludes(WAIT_FREE, AVERAGED_SLOTS, why="a late average could make Adam's second moments negative"),
    *_excludes(WAIT_FREE, ACROSS_HOSTS, why="with the latter, the ranks of a host wait for each other at every step"),
    *_excludes(WAIT_FREE, ADACOMM, why="rounds end when the slowest rank has made its steps"),
    Needs(FRAGMENT_DELAY, OVERLAP),
    Needs(ROUND_QUORUM, WAIT_FREE),
    Needs(ROUND_GRACE, ROUND_QUORUM),
    *_excludes(WAIT_FREE, FRAGMENT_DELAY, why="ranks make different numbers of steps in a round"),
    *_excludes(ADACOMM, FRAGMENTS, FRAGMENT_DELAY, why="they divide an interval that adacomm would change"),
    *_excludes(
        MERGE_ALPHA,
        AVERAGED_SLOTS,
        why="what ranks keep of their own slots could make Adam's second moments negative",
    ),
    # Stragglers.
    *_excludes(SHARES, BALANCE, why="both assign samples to ranks"),
    Needs(BALANCE_EVERY, BALANCE),
    Needs(MAX_BATCH_SIZE, BALANCE),
    *_excludes(
        BALANCE,
        JIT_COMPILE,
        why="batch sizes change, and XLA compiles each of them again",
        instead="use fixed shares",
    ),
    *_excludes(BALANCE, DETERMINISTIC, why="step times vary from run to run", instead="use fixed shares"),
    *_excludes(ADASUM, BALANCE, SHARES, why="Adasum needs batches of equal size on all ranks"),
    *_excludes(QUORUM, LOCAL, why="in local SGD, ranks make no step together"),
    *_excludes(QUORUM, SYNC_BATCHNORM, SYNCHRONIZED_LAYERS, why=_EVERY_STEP),
    *_excludes(QUORUM, ACCUMULATION, why="a step is one micro-batch of each rank", instead="use larger batches"),
    *_excludes(QUORUM, SEVERAL_STEPS, AUTOTUNE, why="ranks learn after each update which micro-batch comes next"),
    *_excludes(QUORUM, BALANCE, SHARES, why=_COMMON_STEPS),
    *_excludes(QUORUM, BAD_SAMPLES, why="a rank alone cannot replace a micro-batch"),
    *_excludes(
        QUORUM, SUM, ADASUM, COMPRESSION, why="the gradients of the ranks that are ready are added up as they are"
    ),
    *_excludes(QUORUM, SHARDED_OPTIMIZER, why="a late rank makes the updates that it missed, from its own state"),
    *_excludes(QUORUM, SEVERAL_OPTIMIZERS, why="the gradients of a step are computed apart from its update"),
    *_excludes(
        QUORUM,
        STREAM,
        why="the rest of an epoch is redistributed by sample number",
        instead="use arrays, TFRecords or hvdtrain.data.RandomAccess",
    ),
    *_excludes(QUORUM, EAGER_MODEL, why="both halves of a step are compiled"),
    *_excludes(QUORUM, COUNTED_LOSS, why="a late rank does not communicate in the forward pass"),
    *_excludes(QUORUM, GATHERED_SAMPLES, why="a late rank does not communicate in the forward pass"),
    *_excludes(QUORUM, USED_GRADIENTS, why="the gradients of a step are reduced when all contributors are known"),
    *(Needs(each, QUORUM) for each in (STEP_DEADLINE, STEP_GRACE, MAX_MISSED_UPDATES)),
    *(Needs(each, QUORUM, (WAIT_FREE,)) for each in (RECORD, REPLAY)),
    # The size of the batch.
    *_excludes(RESCALE, GLOBAL_BATCH_SIZE, why="one lets the global batch change, the other keeps it"),
    *_excludes(RESCALE, LOCAL, why="in local SGD, ranks have made different numbers of steps"),
    *_excludes(RESCALE, QUORUM, why="with a quorum, each rank reads ahead in its own part of the epoch"),
    *_excludes(RESCALE, DROPPED_REMAINDER, why="the rest of an epoch may be less than a step"),
    *_excludes(RESCALE, STREAM, why="a dataset can only be read from its beginning"),
    *_excludes(RESCALE, LR_DECAY, why="the decay depends on the number of steps, which changes"),
    Excludes((RESCALE, LR_SCALING, WARMUP_STEPS), "the warm-up fixes the learning rate that scaling changes"),
    *_excludes(GLOBAL_BATCH_SIZE, LR_SCALING, why="the global batch stays the same, and so does its learning rate"),
    # XLA.
    *_excludes(
        JIT_COMPILE, SYNC_BATCHNORM, SYNCHRONIZED_LAYERS, why="XLA cannot compile the communication in the forward pass"
    ),
    *_excludes(JIT_COMPILE, DETERMINISTIC, why="XLA has no deterministic form of some operations"),
    *_excludes(JIT_COMPILE, SEVERAL_OPTIMIZERS, why="the gradients of a step are computed apart from its update"),
    *_excludes(JIT_COMPILE, SCALAR_LOSS, why="XLA leaves out the check that the loss is a mean over samples"),
    *_excludes(JIT_COMPILE, COUNTED_LOSS, why="the loss is combined over ranks in the forward pass"),
    *_excludes(JIT_COMPILE, GATHERED_SAMPLES, why="they are gathered in the forward pass"),
    *_excludes(JIT_COMPILE, USED_GRADIENTS, why="they are reduced over ranks in the middle of the step"),
    # The reduction of gradients.
    *_excludes(ADASUM, COMPRESSION, why="Adasum combines whole gradients"),
    *_excludes(ADASUM, GROUPS, why="Adasum reduces each gradient alone"),
    *_excludes(SHARDED_OPTIMIZER, ADASUM, COMPRESSION, why="each rank receives its part of the mean or the sum"),
    *_excludes(SHARDED_OPTIMIZER, SWAPPED_EMA, why="the callback needs the whole EMA on every rank"),
    Needs(COMPRESSION_AFTER, COMPRESSION),
    *_excludes(
        LOCAL_LAYERS,
        GLOBAL_CLIP_NORM,
        why="the norm of all gradients differs between ranks",
        instead="use clipnorm or clipvalue",
    ),
    *_excludes(LOCAL_LAYERS, ADASUM, why="Adasum combines the gradients of all ranks"),
    *_excludes(LOCAL_LAYERS, SHARDED_OPTIMIZER, why="each rank updates its own layers"),
    *_excludes(
        LOCAL_LAYERS, TRAINER, why="a trainer keeps all replicas equal", instead="use model.fit or your own loop"
    ),
    # Sharded tables.
    *_excludes(SHARDED_TABLE, LOCAL, why="a rank asks the others for rows in every step"),
    *_excludes(SHARDED_TABLE, QUORUM, why="a late rank does not communicate in the forward pass"),
    *_excludes(SHARDED_TABLE, BALANCE, why="ranks wait for each other in lookups, which hides the time of each"),
    *_excludes(SHARDED_TABLE, JIT_COMPILE, why="XLA cannot compile the exchange of rows"),
    *_excludes(SHARDED_TABLE, ADASUM, why="Adasum combines whole gradients"),
    *_excludes(SHARDED_TABLE, SHARDED_OPTIMIZER, why="the state of a table is on the rank of its rows already"),
    *_excludes(SHARDED_TABLE, LOCAL_LAYERS, why="gradients of rows are means over the samples of all ranks"),
    *_excludes(SHARDED_TABLE, USED_GRADIENTS, why="no rank has the gradient of a whole table"),
    *_excludes(
        SHARDED_TABLE,
        SAVED_BY_KERAS,
        why="they run on rank 0 only, which has 1/N of the rows",
        instead="use hvdtrain.callbacks.Checkpoint or hvdtrain.Checkpointer",
    ),
    *_excludes(
        SHARDED_TABLE,
        ELASTIC,
        why="a lost rank takes its rows with it",
        instead="use launch/run --restarts",
    ),
    # Optimizer and learning rate.
    *_excludes(SKIPPED_STEPS, SEVERAL_OPTIMIZERS, why="each optimizer decides about its own variables"),
    *_excludes(CLIP_NORM, CLIP_VALUE, why="Keras applies one kind of clipping"),
    *_excludes(LR_DECAY_STEPS, LR_DECAY_EPOCHS, why="both say when the learning rate decays"),
    Needs(EMA_RAMP, EMA),
    # Elastic jobs.
    *_excludes(
        ELASTIC,
        *(QUORUM, ACROSS_HOSTS, SYNC_STEPS_FIRST, RECORD, REPLAY, AUTOTUNE),
        why=_NO_CHANGE,
        instead="use launch/run --restarts",
    ),
    *_excludes(ELASTIC, ADASUM, why="Adasum needs MPI", instead="use launch/run --restarts"),
    *_excludes(
        ELASTIC,
        SHARDED_OPTIMIZER,
        why="a lost rank takes its part of the state with it",
        instead="use launch/run --restarts",
    ),
    Excludes((ELASTIC, SUM, MEAN_LOSS), "the size of the updates would depend on the number of ranks"),
    *_excludes(
        ELASTIC_LOOP,
        COMPRESSION,
        why="the loop does not keep the state of a compression",
        instead="use hvdtrain.Trainer",
    ),
    # Other commands.
    *_excludes(WATCH, CHECKPOINT, why="each new checkpoint is evaluated"),
    *_excludes(MPI, GLOO, why="ranks communicate over one of them"),
    *_excludes(HOSTS, HOSTFILE, why="both name the hosts"),
    *_excludes(
        BENCH,
        *(ADACOMM, WAIT_FREE, SYNC_STEPS_FIRST, ACROSS_HOSTS),
        why="it measures equal rounds of all ranks",
    ),
    Needs(LINK_MBIT, LINK_LATENCY_MS),
    Needs(LINK_LATENCY_MS, LINK_MBIT),
    Needs(WITHIN_MBIT, WITHIN_LATENCY_MS),
    Needs(WITHIN_LATENCY_MS, WITHIN_MBIT),
)

OPTIONS = [fact for fact in dict.fromkeys(f for rule in RULES for f in rule.facts) if isinstance(fact, Option)]


def option_facts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[Fact, str]:
    """The facts that hold for options, given by flat name, each with the value received."""
    return {
        fact: option(fact.name, values[fact.name])
        for fact in OPTIONS
        if fact.name in values and fact.holds(values[fact.name], defaults[fact.name])
    }


def facts_from(*facts: Fact) -> dict[Fact, str]:
    """Facts that hold, each as it is named in messages."""
    return {fact: str(fact) for fact in facts}


def first_broken(facts: Mapping[Fact, str], known: Iterable[str] | None = None) -> Excludes | Needs | None:
    """The first rule that does not hold of these facts.

    Args:
        known: the names of options that are known (default: all); a rule about others is left out.
    """
    names = None if known is None else set(known)
    for rule in RULES:
        needed = {each.name for each in rule.others} if isinstance(rule, Needs) else set()
        if (names is None or needed <= names) and rule.is_broken(facts):
            return rule
    return None


def refusal_of(facts: Mapping[Fact, str]) -> str:
    """Why facts that are known to exclude each other are refused."""
    rule = first_broken(facts, known=())
    assert rule is not None, facts
    return rule.message(facts)


def require_compatible(facts: Mapping[Fact, str], known: Iterable[str] | None = None) -> None:
    """Refuses facts that exclude each other; see :func:`first_broken`.

    Raises:
        UsageError: two facts exclude each other.
    """
    if (rule := first_broken(facts, known)) is not None:
        raise UsageError(rule.message(facts))
