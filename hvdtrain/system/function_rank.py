"""The program of a rank of :func:`hvdtrain.run`: calls the function and writes its result, or its error, to a file."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

CALL, PATHS = "call.pickle", "sys_path.json"
"""Files that :func:`hvdtrain.run` writes: the function with its arguments, and where to import from."""


def outcome_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank}.pickle"


def output_name(rank: int) -> str:
    """The name of the file that a rank prints to."""
    return f"rank{rank}.log"


def main(folder: Path) -> None:
    """Writes the time, the pickled result or exception, and the traceback of an error."""
    sys.path[:] = json.loads((folder / PATHS).read_text())
    import cloudpickle

    from hvdtrain.system import environment
    from hvdtrain.system.atomic_files import replaced_on_success

    rank = environment.launcher().rank
    _print_to(folder / output_name(rank))
    value: object = None
    text: str | None = None
    try:
        function, args, kwargs = cloudpickle.loads((folder / CALL).read_bytes())
        value = function(*args, **kwargs)
        pickled = cloudpickle.dumps(value)
    except BaseException as error:
        # Without this file's own frame.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = None
    with replaced_on_success(folder / outcome_name(rank)) as aside:
        aside.write_bytes(cloudpickle.dumps((time.time_ns(), pickled, text)))
    if text is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: Horovod's end waits for the other ranks, which wait for this one.
        os._exit(1)


def _print_to(path: Path) -> None:
    """Not to the launcher, which tags lines, and joins those of several ranks."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
