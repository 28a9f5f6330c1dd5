"""``--make-sample-data``: writes generated files to try a task with."""

from pathlib import Path

from hvdtrain.errors import DataError, UsageError
from hvdtrain.tasks.loading import load_task


def write(name: str, folder: Path) -> None:
    """Writes a task's sample files to a folder.

    Raises:
        UsageError: the task reads no files, or cannot generate any.
        DataError: the folder is not empty, or not writable.
    """
    task = load_task(name)
    if task.make_sample_data is None:
        raise UsageError(f"--make-sample-data needs a task that reads files and can generate them. Received: {name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DataError(f"--make-sample-data must be a new or empty folder. Received: {folder}")
        task.make_sample_data(folder)
    except OSError as error:
        raise DataError(f"--make-sample-data must be a writable folder. Received: {folder} ({error})") from error
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {files}. To train on them: python -m hvdtrain --task {name} --data-dir {folder}")
