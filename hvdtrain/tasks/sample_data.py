"""``--make-sample-data``: files to try a task on."""

from pathlib import Path

from hvdtrain.errors import DataError, UsageError
from hvdtrain.tasks.loading import load_task


def write(name: str, folder: Path) -> None:
    """Has a task write its files.

    Raises:
        UsageError: the task needs no files, or cannot write any.
        DataError: the folder holds something, or cannot be written.
    """
    task = load_task(name)
    if task.make_sample_data is None:
        raise UsageError(f"--make-sample-data needs a task that reads files, and can write some. Received: {name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DataError(f"--make-sample-data must be a new folder, or an empty one. Received: {folder}")
        task.make_sample_data(folder)
    except OSError as error:
        raise DataError(
            f"--make-sample-data must be a folder that can be written. Received: {folder} ({error})"
        ) from error
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {files}. Train on them: python -m hvdtrain --task {name} --data-dir {folder}")
