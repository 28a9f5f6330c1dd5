"""What ``python -m hvdtrain train`` can be told."""

import dataclasses
import math

from hvdtrain.config.options import (
    LEARNING,
    LOCAL,
    RANKS,
    RUNNING,
    WHAT,
    Config,
    broken,
    flag_of,
    option,
    options,
    require,
)
from hvdtrain.errors import UsageError

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

    task: str = option(WHAT, "digits", _TASK, metavar="NAME")
    data_dir: str | None = option(WHAT, None, "folder with the task's data files", metavar="DIR")
    run_dir: str | None = option(WHAT, None, "folder for all that the run writes (default: runs/<task>)", metavar="DIR")
    steps: int | None = option(WHAT, None, "updates to make; or --epochs (default: the task's)")
    epochs: int | None = option(WHAT, None, "passes over the training data; or --steps")
    batch_size: int | None = option(WHAT, None, "samples per rank and micro-batch (default: the task's)")
    optimizer: str | None = option(
        LEARNING,
        None,
        "a Keras optimizer by its name (sgd, adam, adamw, …), or momentum: SGD with momentum 0.9 (default: the task's)",
        metavar="NAME",
    )
    learning_rate: float | None = option(LEARNING, None, "before --lr-scaling (default: the task's)", metavar="X")
    lr_scaling: str = option(
        LEARNING,
        "none",
        "multiply the learning rate by the number of ranks, its root, or 1",
        choices=("linear", "sqrt", "none"),
    )
    warmup_steps: int = option(LEARNING, 0, "raise the learning rate linearly from 0 over the first N steps")
    lr_decay: str = option(
        LEARNING,
        "none",
        "exponential: times --lr-decay-rate every --lr-decay-steps; cosine: to 0 at the end",
        choices=("none", "exponential", "cosine"),
    )
    lr_decay_rate: float = option(LEARNING, 0.1, "factor of --lr-decay exponential", metavar="X")
    lr_decay_steps: int | None = option(
        LEARNING, None, "steps between two factors of --lr-decay exponential (default: a third of the run)"
    )
    lr_decay_epochs: int | None = option(LEARNING, None, "the same in epochs; or --lr-decay-steps")
    clip_norm: float | None = option(
        LEARNING, None, "largest global norm of the averaged gradient (default: no limit)", metavar="X"
    )
    clip_value: float | None = option(
        LEARNING, None, "largest magnitude of an element of the averaged gradient (default: no limit)", metavar="X"
    )
    weight_decay: float | None = option(
        LEARNING,
        None,
        "decoupled weight decay, per step and unit of learning rate (default: the optimizer's)",
        metavar="X",
    )
    ema: float | None = option(
        LEARNING,
        None,
        "momentum of a moving average of the weights, which is then evaluated and saved (default: none)",
        metavar="X",
    )
    ema_ramp: bool = option(
        LEARNING, False, "let the momentum of --ema rise to X: the smaller of X and (1 + step) / (10 + step)"
    )
    mixed_precision: str = option(
        LEARNING,
        "none",
        "compute in half precision; float16 with loss scaling",
        choices=("none", "float16", "bfloat16"),
    )
    mode: str = option(
        RANKS,
        "sync",
        "sync: gradients are averaged at every step; local: ranks train alone, and parameters are averaged at times",
        choices=("sync", "local"),
    )
    op: str = option(RANKS, "average", "how gradients of ranks are put together", choices=("average", "sum", "adasum"))
    compression: str = option(RANKS, "none", "how gradients travel between ranks", choices=("none", "fp16"))
    groups: int | None = option(
        RANKS, None, "reduce the gradients in this many messages (default: large ones alone, small ones together)"
    )
    sparse_as_dense: bool = option(
        RANKS, False, "reduce gradients of embeddings as whole tables: less, where batches use most of their rows"
    )
    sync_batchnorm: bool = option(RANKS, False, "batch normalisation over the samples of all ranks")
    accumulate: int = option(RANKS, 1, "micro-batches per step, with one allreduce for all of them", metavar="K")
    check_every: int = option(RANKS, 500, "steps between comparisons of all variables over ranks; 0: only at the end")
    average_every: int = option(LOCAL, 16, "steps between two averages of the parameters", metavar="H")
    average_schedule: str = option(
        LOCAL, "constant", "adacomm: --average-every shrinks as the loss falls", choices=("constant", "adacomm")
    )
    average_slots: str = option(
        LOCAL,
        "keep",
        "the optimizer's own variables (momentum and the like): of each rank, or averaged",
        choices=("average", "keep"),
    )
    outer: str = option(
        LOCAL,
        "average",
        "take the average as it is, or as a step of an outer optimizer",
        choices=("average", "nesterov"),
    )
    outer_rate: float = option(LOCAL, 0.7, "learning rate of --outer nesterov", metavar="X")
    outer_momentum: float = option(LOCAL, 0.9, "momentum of --outer nesterov", metavar="X")
    overlap: bool = option(LOCAL, False, "average in the background while ranks go on")
    wait_free: bool = option(
        LOCAL, False, "no rank waits for a slower one: it makes more steps meanwhile, with --overlap too"
    )
    local_after: int = option(LOCAL, 0, "steps in sync mode first")
    average_across: str = option(
        LOCAL,
        "rank",
        "host: ranks of a host average their gradients at every step",
        choices=("rank", "host"),
    )
    eval_every: int = option(RUNNING, 0, "steps between evaluations; 0: at the end of each epoch")
    checkpoint_every: int = option(RUNNING, 500, "steps between checkpoints; 0: only at the end, or when asked to stop")
    keep: int = option(RUNNING, 3, "checkpoints to keep", metavar="K")
    resume: str = option(
        RUNNING,
        "auto",
        "auto: go on from the run folder's last checkpoint, if there is one; must: refuse where there is none; never: "
        "refuse where there is a run; or the path of a checkpoint or run",
        metavar="{auto,never,must,PATH}",
    )
    stall_timeout: float = option(
        RUNNING,
        600.0,
        "end the job where a rank is silent, or no rank gets on, for so long; 0: never",
        metavar="SECONDS",
    )
    log_every: int = option(RUNNING, 10, "steps between log lines")
    histograms_every: int = option(
        RUNNING, 0, "steps between histograms of weights, gradients and activations in TensorBoard; 0: none"
    )
    on_nan: str = option(
        RUNNING,
        "stop",
        "what follows a loss or gradient that is not finite: end the job, or skip the step on every rank",
        choices=("stop", "skip"),
    )
    bad_samples: int = option(RUNNING, 0, "samples that may be unreadable, over all ranks; they are told and left out")
    timeline: str | None = option(
        RUNNING, None, "file for Horovod's trace of all reductions, for chrome://tracing", metavar="FILE"
    )
    profile_steps: str | None = option(
        RUNNING, None, "steps to profile with TensorFlow's profiler, into the run folder's tensorboard/", metavar="A:B"
    )
    seed: int = option(RUNNING, 0, "of the initial weights, the order of samples and dropout")
    deterministic: bool = option(RUNNING, False, "bit-equal runs: deterministic operations, sums in a fixed order")
    threads: int | None = option(RUNNING, None, "compute threads per rank (default: a fair share of the host's cores)")
    steps_per_call: int = option(RUNNING, 1, "steps in one compiled call; more is faster for small models", metavar="K")
    jit_compile: bool = option(RUNNING, False, "let XLA compile the forward and backward pass")
    autotune: bool = option(
        RUNNING,
        False,
        "first try --steps-per-call and --groups on a copy of the model, for seconds, and take the fastest",
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
            require(self, name, lambda value: value >= 1, "at least 1")
        for name in (
            *("warmup_steps", "eval_every", "check_every", "histograms_every", "bad_samples", "seed"),
            *("checkpoint_every", "stall_timeout", "local_after"),
        ):
            require(self, name, lambda value: value >= 0, "at least 0")
        for name in ("learning_rate", "clip_norm", "clip_value", "lr_decay_rate"):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(
            self, "weight_decay", lambda value: math.isfinite(value) and value >= 0, "a finite number of at least 0"
        )
        require(self, "ema", lambda value: 0 <= value < 1, "at least 0 and below 1")
        require(
            self, "profile_steps", lambda value: _is_step_range(value), "two steps, first:last, the first at least 1"
        )
        for field in options(self):
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in choices:
                raise broken(field.name, "one of " + ", ".join(choices), getattr(self, field.name))
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


def _is_step_range(text: str) -> bool:
    first, _, last = text.partition(":")
    return first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)
