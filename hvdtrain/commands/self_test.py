"""``hvdtrain test``: a short job on this machine that checks what training needs."""

import time

from hvdtrain.commands.launch import controller_of
from hvdtrain.errors import HvdtrainError
from hvdtrain.system import function_job
from hvdtrain.system.tensorflow_start import import_tensorflow

_RANKS = 2
_TIMEOUT_S = 300.0


def run(*, mpi: bool = False, gloo: bool = False) -> int:
    """Prints a line for each check, as soon as all have passed.

    Raises:
        UsageError: both switches are set, or this process is a rank.
        HvdtrainError: a check failed.
    """
    start_s = time.monotonic()
    controller = controller_of(mpi, gloo)
    print(f"hvdtrain test: starting {_RANKS} ranks on this machine", flush=True)
    try:
        lines = function_job.run(_check, _RANKS, controller=controller, timeout_s=_TIMEOUT_S, quiet=True)[0]
    except Exception as error:
        why = error.__cause__ if isinstance(error.__cause__, function_job.RankError) else ""
        raise HvdtrainError(
            f"{_RANKS} ranks must train together on this machine. Received: {type(error).__name__}: {error}{why}\n"
            "python -m hvdtrain doctor checks the installation."
        ) from error
    for line in lines:
        print(f"  {line}")
    print(f"hvdtrain works here ({time.monotonic() - start_s:.0f} s).", flush=True)
    return 0


def _check() -> list[str]:
    # Imported here, because only the ranks need TensorFlow.
    import_tensorflow()
    from hvdtrain.commands.self_test_checks import check_all

    return check_all()
