"""The configuration of a run: frozen, validated when it is built, the one source of --help."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hvdtrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


WHAT, LEARNING, RANKS, RUNNING = "what to train", "learning", "between ranks", "running"
LOCAL = "between ranks, with --mode local"
MEASURING = "measuring"
PREDICTING = "predicting, with --predict"


def _option(group: str, default: Any, text: str, *, metavar: str = "N", choices: tuple[str, ...] | None = None) -> Any:
    """A field with the line that documents it in ``--help``; where the default is None, the line tells what follows."""
    metadata = {"group": group, "help": text, "metavar": metavar, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


class Config:
    """What a command can be told."""

    stall_timeout: float

    def as_dict(self) -> dict[str, Any]:
        """The values by field name, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in options(self)}


_TASK = (
    "a built-in task (digits, cifar10, mnist, mnist-softmax, tabular, text, synthetic-resnet50, "
    "synthetic-transformer), package.module:attribute, or the path of a .py file with a TASK"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Everything ``python -m hvdtrain train`` can be told. ``None`` means: the task's own default.

    Raises:
        UsageError: a value breaks its rule.
    """

    task: str = _option(WHAT, "digits", _TASK, metavar="NAME")
    data_dir: str | None = _option(WHAT, None, "folder with the task's data files", metavar="DIR")
    run_dir: str | None = _option(
        WHAT, None, "folder for all that the run writes (default: runs/<task>)", metavar="DIR"
    )
    steps: int | None = _option(WHAT, None, "updates to make; or --epochs (default: the task's)")
    epochs: int | None = _option(WHAT, None, "passes over the training data; or --steps")
    batch_size: int | None = _option(WHAT, None, "samples per rank and micro-batch (default: the task's)")
    optimizer: str | None = _option(
        LEARNING,
        None,
        "a Keras optimizer by its name (sgd, adam, adamw, …), or momentum: SGD with momentum 0.9 (default: the task's)",
        metavar="NAME",
    )
    learning_rate: float | None = _option(LEARNING, None, "before --lr-scaling (default: the task's)", metavar="X")
    lr_scaling: str = _option(
        LEARNING,
        "none",
        "multiply the learning rate by the number of ranks, its root, or 1",
        choices=("linear", "sqrt", "none"),
    )
    warmup_steps: int = _option(LEARNING, 0, "raise the learning rate linearly from 0 over the first N steps")
    lr_decay: str = _option(
        LEARNING,
        "none",
        "exponential: times --lr-decay-rate every --lr-decay-steps; cosine: to 0 at the end",
        choices=("none", "exponential", "cosine"),
    )
    lr_decay_rate: float = _option(LEARNING, 0.1, "factor of --lr-decay exponential", metavar="X")
    lr_decay_steps: int | None = _option(
        LEARNING, None, "steps between two factors of --lr-decay exponential (default: a third of the run)"
    )
    lr_decay_epochs: int | None = _option(LEARNING, None, "the same in epochs; or --lr-decay-steps")
    clip_norm: float | None = _option(
        LEARNING, None, "largest global norm of the averaged gradient (default: no limit)", metavar="X"
    )
    clip_value: float | None = _option(
        LEARNING, None, "largest magnitude of an element of the averaged gradient (default: no limit)", metavar="X"
    )
    weight_decay: float | None = _option(
        LEARNING,
        None,
        "decoupled weight decay, per step and unit of learning rate (default: the optimizer's)",
        metavar="X",
    )
    ema: float | None = _option(
        LEARNING,
        None,
        "momentum of a moving average of the weights, which is then evaluated and saved (default: none)",
        metavar="X",
    )
    ema_ramp: bool = _option(
        LEARNING, False, "let the momentum of --ema rise to X: the smaller of X and (1 + step) / (10 + step)"
    )
    mixed_precision: str = _option(
        LEARNING,
        "none",
        "compute in half precision; float16 with loss scaling",
        choices=("none", "float16", "bfloat16"),
    )
    mode: str = _option(
        RANKS,
        "sync",
        "sync: gradients are averaged at every step; local: ranks train alone, and parameters are averaged at times",
        choices=("sync", "local"),
    )
    op: str = _option(RANKS, "average", "how gradients of ranks are put together", choices=("average", "sum", "adasum"))
    compression: str = _option(RANKS, "none", "how gradients travel between ranks", choices=("none", "fp16"))
    groups: int | None = _option(RANKS, None, "reduce the gradients in this many messages (default: Horovod's choice)")
    sync_batchnorm: bool = _option(RANKS, False, "batch normalisation over the samples of all ranks")
    accumulate: int = _option(RANKS, 1, "micro-batches per step, with one allreduce for all of them", metavar="K")
    check_every: int = _option(RANKS, 500, "steps between comparisons of all variables over ranks; 0: only at the end")
    average_every: int = _option(LOCAL, 16, "steps between two averages of the parameters", metavar="H")
    average_schedule: str = _option(
        LOCAL, "constant", "adacomm: --average-every shrinks as the loss falls", choices=("constant", "adacomm")
    )
    average_slots: str = _option(
        LOCAL,
        "keep",
        "the optimizer's own variables (momentum and the like): of each rank, or averaged",
        choices=("average", "keep"),
    )
    outer: str = _option(
        LOCAL,
        "average",
        "take the average as it is, or as a step of an outer optimizer",
        choices=("average", "nesterov"),
    )
    outer_rate: float = _option(LOCAL, 0.7, "learning rate of --outer nesterov", metavar="X")
    outer_momentum: float = _option(LOCAL, 0.9, "momentum of --outer nesterov", metavar="X")
    overlap: bool = _option(LOCAL, False, "average in the background while ranks go on")
    wait_free: bool = _option(
        LOCAL, False, "no rank waits for a slower one: it makes more steps meanwhile, with --overlap too"
    )
    local_after: int = _option(LOCAL, 0, "steps in sync mode first")
    average_across: str = _option(
        LOCAL,
        "rank",
        "host: ranks of a host average their gradients at every step",
        choices=("rank", "host"),
    )
    eval_every: int = _option(RUNNING, 0, "steps between evaluations; 0: at the end of each epoch")
    checkpoint_every: int = _option(
        RUNNING, 500, "steps between checkpoints; 0: only at the end, or when asked to stop"
    )
    keep: int = _option(RUNNING, 3, "checkpoints to keep", metavar="K")
    resume: str = _option(
        RUNNING,
        "auto",
        "auto: go on from the run folder's last checkpoint, if there is one; must: refuse where there is none; never: "
        "refuse where there is a run; or the path of a checkpoint or run",
        metavar="{auto,never,must,PATH}",
    )
    stall_timeout: float = _option(
        RUNNING,
        600.0,
        "end the job where a rank is silent, or no rank gets on, for so long; 0: never",
        metavar="SECONDS",
    )
    log_every: int = _option(RUNNING, 10, "steps between log lines")
    histograms_every: int = _option(
        RUNNING, 0, "steps between histograms of weights, gradients and activations in TensorBoard; 0: none"
    )
    on_nan: str = _option(
        RUNNING,
        "stop",
        "what follows a loss or gradient that is not finite: end the job, or skip the step on every rank",
        choices=("stop", "skip"),
    )
    bad_samples: int = _option(RUNNING, 0, "samples that may be unreadable, over all ranks; they are told and left out")
    timeline: str | None = _option(
        RUNNING, None, "file for Horovod's trace of all reductions, for chrome://tracing", metavar="FILE"
    )
    profile_steps: str | None = _option(
        RUNNING, None, "steps to profile with TensorFlow's profiler, into the run folder's tensorboard/", metavar="A:B"
    )
    seed: int = _option(RUNNING, 0, "of the initial weights, the order of samples and dropout")
    deterministic: bool = _option(RUNNING, False, "bit-equal runs: deterministic operations, sums in a fixed order")
    threads: int | None = _option(RUNNING, None, "compute threads per rank (default: a fair share of the host's cores)")
    steps_per_call: int = _option(
        RUNNING, 1, "steps in one compiled call; more is faster for small models", metavar="K"
    )
    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)
    """Which of them were said, and not left to the task."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "epochs",
            "batch_size",
            "accumulate",
            "groups",
            "log_every",
            "threads",
            "steps_per_call",
            "keep",
            "average_every",
            "lr_decay_steps",
            "lr_decay_epochs",
        ):
            _require(self, name, lambda value: value >= 1, "at least 1")
        for name in (
            *("warmup_steps", "eval_every", "check_every", "histograms_every", "bad_samples", "seed"),
            *("checkpoint_every", "stall_timeout", "local_after"),
        ):
            _require(self, name, lambda value: value >= 0, "at least 0")
        for name in ("learning_rate", "clip_norm", "clip_value", "lr_decay_rate"):
            _require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        _require(
            self, "weight_decay", lambda value: math.isfinite(value) and value >= 0, "a finite number of at least 0"
        )
        _require(self, "ema", lambda value: 0 <= value < 1, "at least 0 and below 1")
        _require(
            self, "profile_steps", lambda value: _is_step_range(value), "two steps, first:last, the first at least 1"
        )
        for field in options(self):
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in choices:
                raise _broken(field.name, "one of " + ", ".join(choices), getattr(self, field.name))
        if self.steps is not None and self.epochs is not None:
            raise UsageError(
                f"--steps and --epochs exclude each other. Received: {self.steps} and {self.epochs}. Give one of them."
            )
        if self.lr_decay_steps is not None and self.lr_decay_epochs is not None:
            raise UsageError(
                "--lr-decay-steps and --lr-decay-epochs exclude each other. Received: "
                f"{self.lr_decay_steps} and {self.lr_decay_epochs}. Give one of them."
            )
        if self.ema_ramp and self.ema is None:
            raise UsageError("--ema-ramp is of --ema. Received: no --ema. Give it, or leave --ema-ramp out.")
        if self.mode == "sync":
            fields = [field for field in options(self) if field.metadata["group"] == LOCAL]
            for field in fields:
                if getattr(self, field.name) != field.default:
                    raise UsageError(
                        f"{flag_of(field.name)} is of --mode local. Received: {getattr(self, field.name)!r} in sync "
                        "mode. Add --mode local, or leave it out."
                    )
        elif self.op != "average":
            raise UsageError(f"--mode local averages. Received: --op {self.op}. Leave --op out.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UsageError(
                "--clip-norm and --clip-value exclude each other. Received: "
                f"{self.clip_norm} and {self.clip_value}. Give one of them."
            )

    @property
    def profile_range(self) -> tuple[int, int]:
        """The first and last step to profile; 0 and 0 for none."""
        first, _, last = (self.profile_steps or "0:0").partition(":")
        return int(first), int(last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReadingConfig(Config):
    """What all commands can be told that read a run."""

    task: str = _option(WHAT, "digits", "the run's, to find its folder by", metavar="NAME")
    run_dir: str | None = _option(WHAT, None, "the run's folder (default: runs/<task>)", metavar="DIR")
    checkpoint: str | None = _option(WHAT, None, "path of a checkpoint (default: the run's latest)", metavar="PATH")
    data_dir: str | None = _option(
        WHAT, None, "folder with the task's data files (default: the run's own)", metavar="DIR"
    )
    threads: int | None = _option(RUNNING, None, "compute threads per rank (default: a fair share of the host's cores)")
    stall_timeout: float = _option(
        RUNNING, 600.0, "end the job where a rank is silent for so long; 0: never", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        _require(self, "threads", lambda value: value >= 1, "at least 1")
        _require(self, "stall_timeout", lambda value: value >= 0, "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(_ReadingConfig):
    """Everything ``python -m hvdtrain eval`` can be told."""

    batch_size: int | None = _option(RUNNING, None, "samples per rank and batch (default: the run's)")
    watch: bool = _option(
        RUNNING, False, "evaluate each checkpoint as it appears, until the run has ended and its last is done"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "batch_size", lambda value: value >= 1, "at least 1")
        if self.watch and self.checkpoint is not None:
            raise UsageError(
                f"--watch takes the latest checkpoint each time. Received: --checkpoint {self.checkpoint}. "
                "Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(_ReadingConfig):
    """Everything ``python -m hvdtrain export`` can be told."""

    format: str = _option(WHAT, "keras", "what to write", choices=("keras", "saved_model", "onnx"))
    output: str | None = _option(
        WHAT,
        None,
        "where to write it, a place that is not there yet (default: export… in the run's folder)",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("keras", "saved_model", "onnx"):
            raise _broken("format", "one of keras, saved_model, onnx", self.format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(TrainConfig):
    """Everything ``python -m hvdtrain bench`` can be told: what of training decides how long a step takes."""

    output: str = _option(MEASURING, "bench", "folder for bench.json and bench.png", metavar="DIR")
    blocks: int = _option(MEASURING, 10, "measurements of each case, in turn with the others")
    block_seconds: float = _option(MEASURING, 1.0, "how long a measurement is to take, at least", metavar="SECONDS")
    max_spread: float = _option(
        MEASURING,
        0.1,
        "report nothing where every other measurement of a case differs from those between by more than this share",
        metavar="X",
    )
    predict: str | None = _option(
        PREDICTING, None, "numbers of ranks whose steps to predict, such as 8,64,512", metavar="N,…"
    )
    ranks_per_host: int | None = _option(PREDICTING, None, "ranks on each host (default: as in this job)")
    link_mbit: float | None = _option(
        PREDICTING, None, "rate that the link of a host gives to an allreduce (default: measured)", metavar="X"
    )
    link_latency_ms: float | None = _option(
        PREDICTING, None, "of a message between hosts, software included (default: measured)", metavar="X"
    )
    within_mbit: float | None = _option(
        PREDICTING,
        None,
        "the same within a host (default: measured, where all ranks of this job share one)",
        metavar="X",
    )
    within_latency_ms: float | None = _option(PREDICTING, None, "of a message within a host", metavar="X")
    rank_mtbf_hours: float | None = _option(
        PREDICTING, None, "mean time between failures of one rank (default: no failures)", metavar="X"
    )
    checkpoint_minutes: float = _option(PREDICTING, 10.0, "training time between checkpoints", metavar="X")
    checkpoint_seconds: float = _option(PREDICTING, 1.0, "what a checkpoint keeps ranks from training", metavar="X")
    restart_seconds: float = _option(PREDICTING, 60.0, "from a failure to the next step", metavar="X")
    mode: str = "local"
    """Both modes are measured."""

    NOT_OFFERED: ClassVar[frozenset[str]] = frozenset(
        {
            *("run_dir", "steps", "epochs", "mode", "op", "sync_batchnorm", "accumulate", "check_every", "wait_free"),
            *("average_schedule", "local_after", "average_across", "eval_every", "checkpoint_every", "keep", "resume"),
            *("log_every", "histograms_every", "on_nan", "timeline", "profile_steps", "deterministic", "ema_ramp"),
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "blocks", lambda value: value >= 4, "at least 4")
        for name in (
            *("block_seconds", "max_spread", "link_mbit", "within_mbit", "rank_mtbf_hours", "checkpoint_minutes"),
            *("link_latency_ms", "within_latency_ms", "checkpoint_seconds", "restart_seconds"),
        ):
            _require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        _require(self, "ranks_per_host", lambda value: value >= 1, "at least 1")
        for one, other in (("link_mbit", "link_latency_ms"), ("within_mbit", "within_latency_ms")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise UsageError(f"{flag_of(one)} and {flag_of(other)} belong together. Received: one of them.")
        if self.predict is not None and not all(each.isdigit() and int(each) > 0 for each in self.predict.split(",")):
            raise _broken("predict", "numbers of ranks with commas between them, such as 8,64,512", self.predict)

    @property
    def predicted_ranks(self) -> list[int]:
        """Those of ``--predict``."""
        return [] if self.predict is None else [int(each) for each in self.predict.split(",")]


def options(config: Any) -> list["dataclasses.Field[Any]"]:
    """The fields of a configuration, or of its class, that a flag sets."""
    hidden: frozenset[str] = getattr(config, "NOT_OFFERED", frozenset())
    return [field for field in dataclasses.fields(config) if "help" in field.metadata and field.name not in hidden]


def _is_step_range(text: str) -> bool:
    first, _, last = text.partition(":")
    return first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)


def flag_of(name: str) -> str:
    """``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def _broken(name: str, rule: str, received: object) -> UsageError:
    return UsageError(f"{flag_of(name)} must be {rule}. Received: {received!r}")


def _require(config: Config, name: str, holds: Callable[[Any], bool], rule: str) -> None:
    value = getattr(config, name)
    if value is not None and not holds(value):
        raise _broken(name, rule, value)


def converted(name: str, value: Any, kind_of_config: type[Config] = TrainConfig) -> Any:
    """A value from the command line or a TOML file as the type of its field.

    Raises:
        UsageError: the field does not exist or the value is not of its type.
    """
    kinds = {field.name: str(field.type) for field in options(kind_of_config)}
    if name not in kinds:
        raise UsageError(f"unknown key {name!r}. Known keys: {', '.join(sorted(kinds))}")
    kind = kinds[name]
    try:
        if "bool" in kind:
            if isinstance(value, bool):
                return value
            raise ValueError
        if isinstance(value, bool):
            raise ValueError
        if "int" in kind:
            if isinstance(value, float):
                raise ValueError
            return int(value)
        if "float" in kind:
            return float(value)
        if not isinstance(value, str):
            raise ValueError
        return value
    except ValueError:
        words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
        rule = next(text for word, text in words.items() if word in kind)
        raise _broken(name, rule, value) from None


def read_toml(path: str) -> dict[str, Any]:
    """The keys of a TOML file, named as the flags are (``batch-size`` or ``batch_size``).

    Raises:
        UsageError: the file cannot be read, is not TOML, or holds an unknown key or a wrong value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config must name a readable TOML file. Received: {path!r} ({error})") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config must be TOML. Received: {path!r}: {error}") from error
    try:
        return {key.replace("-", "_"): converted(key.replace("-", "_"), value) for key, value in table.items()}
    except UsageError as error:
        raise UsageError(f"in {path}: {error}") from None


def build(flags: Mapping[str, Any], config_file: str | None, kind: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """A configuration of training from a TOML file and flags; flags win.

    Raises:
        UsageError: a value breaks its rule.
    """
    values = read_toml(config_file) if config_file is not None else {}
    for name, value in flags.items():
        values[name] = converted(name, value, kind)
    return kind(**values, given=frozenset(values))
