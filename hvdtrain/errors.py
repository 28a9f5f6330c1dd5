"""The errors a user can meet, each with the exit code it ends the job with."""


class HvdtrainError(Exception):
    """A rule was broken; the message states the rule, what was received and what to do. Exit code 1."""

    exit_code = 1


class UsageError(HvdtrainError, ValueError):
    """A flag, a configuration key or an argument is wrong. Exit code 64."""

    exit_code = 64


class NonFiniteError(HvdtrainError):
    """A loss or a gradient is NaN or infinite. Exit code 1.

    Args:
        rank: the one that alone meets it; None: every rank does.
    """

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class DataError(HvdtrainError):
    """Data or a checkpoint is missing or unusable. Exit code 65."""

    exit_code = 65


class DivergenceError(HvdtrainError):
    """Replicas that must be equal are not. Exit code 70."""

    exit_code = 70


class DisagreementError(HvdtrainError):
    """Ranks were started with different flags, versions, data or models. Exit code 78."""

    exit_code = 78


class StoppedEarly(HvdtrainError):  # noqa: N818
    """The job was asked to stop; resume to go on. Exit code 75."""

    exit_code = 75
