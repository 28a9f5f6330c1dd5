"""A record of a run in a file, by rank 0: written while training, and read to repeat the run."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.config.wording import option
from hvdtrain.errors import UsageError
from hvdtrain.system.terminal import report


class RecordFile:
    """Writes a line of JSON for each update, or each round of local SGD; before them, the number of ranks.

    Args:
        unit: what a line is about, for messages: ``updates``.
    """

    def __init__(self, path: str, num_ranks: int, unit: str):
        self._path = Path(path)
        self._num_ranks = num_ranks
        self._unit = unit
        self._file: TextIO | None = None

    def start(self, done: int) -> None:
        """Continues after this many lines; what the file holds of later ones is dropped.

        Raises:
            UsageError: the file holds fewer, or is of a different number of ranks.
        """
        if done:
            found = len(read_record(str(self._path), self._num_ranks))
            if found < done:
                raise UsageError(
                    f"{option('record')} must continue the file of the resumed run. Received: {self._path} with "
                    f"{found} {self._unit} of {done}. Leave {option('record')} out, or start the run from the "
                    "beginning."
                )
            # In place: a run that is killed before it saves again will need these lines.
            lines = self._path.read_bytes().splitlines(keepends=True)
            os.truncate(self._path, sum(len(line) for line in lines[: 1 + done]))
            self._file = self._path.open("a", encoding="utf-8")
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(json.dumps({"ranks": self._num_ranks}) + "\n")

    def add(self, line: Any) -> None:
        """Appends an update, or a round."""
        if self._file is not None:
            with self._ended_if_full():
                self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Writes what is buffered; call it when a checkpoint is saved."""
        if self._file is not None:
            with self._ended_if_full():
                self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            with self._ended_if_full():
                self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _ended_if_full(self) -> Iterator[None]:
        """Gives the record up, not the training and its checkpoints."""
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
            report(
                0,
                f"{option('record')} must be a file that can be written. Received: {self._path} ({error.strerror}). It "
                "ends here, and cannot be replayed to the end; training continues.",
            )


def read_record(path: str, num_ranks: int) -> list[Any]:
    """The lines of a file of :class:`RecordFile`, after the first one.

    An incomplete last line, as a killed run may leave, is ignored.

    Raises:
        UsageError: it cannot be read, or is of a different number of ranks.
    """
    try:
        head, *lines, _ = Path(path).read_text("utf-8").split("\n")
        ranks = json.loads(head)["ranks"]
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{option('replay')} must be a file that {option('record')} wrote. Received: {path} ({error}). Name "
            "another one."
        ) from error
    if ranks != num_ranks:
        raise UsageError(
            f"{option('replay')} must use the recorded number of ranks. Received: "
            f"{path}, of {ranks} ranks, on {num_ranks}."
        )
    return found
