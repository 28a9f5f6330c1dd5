"""hvdtrain's exceptions, each with the exit code with which it ends the job."""


class HvdtrainError(Exception):
    """Base class. Messages state the rule, the value received and the remedy. Exit code 1."""

    exit_code = 1


class UsageError(HvdtrainError, ValueError):
    """A flag, configuration key or argument is invalid. Exit code 64."""

    # AutoGraph raises errors that have it in their own class: those of a step within tf.function.
    __init__ = Exception.__init__

    exit_code = 64


class UnequalError(UsageError):
    """A training step on several ranks is not that of one process. Exit code 64."""


class EndOfCheckedSteps(SystemExit):
    """``hvdtrain check`` has compared enough steps: the program ends on all ranks."""


class NonFiniteError(HvdtrainError):
    """A loss or a gradient is NaN or infinite. Exit code 1.

    Args:
        rank: the only rank that raises it; None: all ranks raise it.
    """

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class DataError(HvdtrainError):
    """Data or a checkpoint is missing or unusable. Exit code 65."""

    exit_code = 65


class StoreError(DataError, OSError):
    """An object store cannot be read or written. Exit code 65."""


class DivergenceError(HvdtrainError):
    """Replicas that must be equal differ. Exit code 70."""

    exit_code = 70


class DisagreementError(HvdtrainError):
    """Ranks were started with different flags, versions, data or models. Exit code 78."""

    exit_code = 78


class StoppedEarly(HvdtrainError):  # noqa: N818
    """The job stopped on request; it can be resumed. Exit code 75."""

    exit_code = 75


class JobError(HvdtrainError):
    """An error of one rank, raised on all ranks with that error's exit code."""

    def __init__(self, message: str, *, exit_code: int, rank: int):
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank
