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


def main(folder: Path) -> None:
    """Writes the time, the pickled result or exception, and the traceback of an error."""
    sys.path[:] = json.loads((folder / PATHS).read_text())
    import cloudpickle

    from hvdtrain.system import environment
    from hvdtrain.system.atomic_files import replaced_on_success

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
    with replaced_on_success(folder / outcome_name(environment.launcher().rank)) as aside:
        aside.write_bytes(cloudpickle.dumps((time.time_ns(), pickled, text)))
    if text is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: Horovod's end waits for the other ranks, which wait for this one.
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
