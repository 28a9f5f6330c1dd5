"""``hvdtrain init``: writes a task to start from."""

from pathlib import Path

from hvdtrain.errors import DataError, UsageError

_TEMPLATE = Path(__file__).with_name("task_template.py")


def run(file: Path) -> int:
    """Writes the file and prints how to train with it.

    Raises:
        UsageError: the name does not end in .py.
        DataError: the file exists, or cannot be written.
    """
    if file.suffix != ".py":
        raise UsageError(f"FILE must end in .py. Received: {str(file)!r}. For example: hvdtrain init task.py")
    text = _TEMPLATE.read_text(encoding="utf-8").replace("FILE", str(file))
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise DataError(
            f"FILE must not exist yet. Received: {str(file)!r}, which exists. It was left untouched."
        ) from None
    except OSError as error:
        raise DataError(f"FILE must be in a folder that can be written. Received: {str(file)!r} ({error})") from error
    print(
        f"{file}: a task to start from. Train it: hvdtrain launch --np 2 python -m hvdtrain --task {file}", flush=True
    )
    return 0
