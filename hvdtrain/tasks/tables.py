"""Reader for tables of texts and labels in .csv, .tsv (with a header line) and .jsonl files."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import DataError

# Texts may exceed the 128 KiB that Python's reader accepts by default.
csv.field_size_limit(sys.maxsize)


class Row(NamedTuple):
    """A text with its label."""

    text: str
    label: str
    place: str
    """Human-readable: ``/data/train.csv, line 7``."""


def read_rows(paths: list[Path], text: str, label: str) -> list[Row]:
    """Reads the rows of all files, in order.

    Args:
        text, label: names of the columns.

    Raises:
        DataError: a file is not UTF-8, lacks a column or has no rows, or a row is incomplete.
    """
    rows: list[Row] = []
    for path in paths:
        try:
            content = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"texts must be UTF-8. Received: {path}, at offset {error.start}: {error.reason}"
            ) from error
        before = len(rows)
        for line, values in _lines(path, content):
            place = f"{path}, line {line}"
            received = [values.get(text), values.get(label)]
            if not isinstance(received[0], str) or not isinstance(received[1], str | int):
                raise DataError(
                    f"each row must have a text in {text!r} and a label in {label!r}. Received: {received[0]!r} and "
                    f"{received[1]!r} in {place}, whose columns are {', '.join(map(str, values))}"
                )
            try:
                f"{received[0]}{received[1]}".encode()
            except UnicodeEncodeError as error:
                raise DataError(f"texts must be valid Unicode. Received: {place}: {error.reason}") from error
            rows.append(Row(received[0], str(received[1]), place))
        if len(rows) == before:
            raise DataError(f"there must be at least one row. Received: {path}, which has none")
    return rows


def _lines(path: Path, content: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield number, _json_object(path, number, line)
        return
    reader = csv.DictReader(
        io.StringIO(content, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
    )
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"rows must be well-formed. Received: {path}, line {reader.reader.line_num}: {error}"
            ) from error
        if values is None:
            return
        columns = reader.fieldnames or []
        if len(set(columns)) < len(columns):
            raise DataError(f"each column must have its own name. Received: {', '.join(columns):.200} in {path}")
        yield reader.line_num, values


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"each line must be JSON. Received: {path}, line {number}: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"each line must be a JSON object. Received: {path}, line {number}: {line.strip()[:60]}")
    return values
