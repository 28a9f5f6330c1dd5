"""Crafted options and configuration files are refused with a short message."""

import os

import pytest

from hvdtrain.commands.cli import parse
from hvdtrain.errors import DataError, UsageError

# All known keys may be listed.
LONGEST_MESSAGE = 1500

FILES = {
    "a list": "batch_size = [1]",
    "a table": "batch_size = {a = 1}",
    "a table in a table": "[training]\nbatch_size = {a = 1}",
    "a date": "batch_size = 2020-01-01",
    "a date for a choice": "mode = 2020-01-01",
    "a list for a choice": "mode = []",
    "deep lists": "x = " + "[" * 10_000 + "]" * 10_000,
    "deep tables": "a." * 5_000 + "b = 1",
    "too many digits": "seed = " + "9" * 5_000,
    "a huge number": "batch_size = " + "9" * 30,
    "a seed of 2^32": "seed = 4294967296",
    "an infinite number": "learning_rate = 1e400",
    "the same key twice": "batch-size = 8\nbatch_size = 16",
    "the same key in a table": "batch_size = 8\n[training]\nbatch_size = 16",
    "an array of tables": "[[training]]\nbatch_size = 1",
    "a long text": "mode = '" + "x" * 500_000 + "'",
    "a long key": "x" * 500_000 + " = 1",
    "3 MB": "task = '" + "x" * 3_000_000 + "'",
    "a null character": 'task = "a\\u0000b"',
    "an empty text": 'run_dir = ""',
    "no option": "explicitly_set = ['seed']",
    "a line separator": '"\\u2028" = 1',
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_crafted_file_is_refused(kind, tmp_path):
    content, path = FILES[kind], tmp_path / "config.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(["--config", str(path)])


@pytest.mark.parametrize(
    "kind", ["a FIFO", "a device", "a folder", "a missing file", "a null character", "a long name"]
)
def test_only_regular_files_are_read(kind, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = {
        "a FIFO": fifo,
        "a device": "/dev/zero",
        "a folder": tmp_path,
        "a missing file": tmp_path / "none",
        "a null character": "a\0b",
        "a long name": "x" * 5_000,
    }[kind]
    assert_refused(["--config", str(path)])
    if kind in ("a FIFO", "a folder", "a long name"):
        assert_refused(["--timeline", str(path)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "4294967296"],
        ["--seed", "9" * 5_000],
        ["--batch-size", "9" * 30],
        ["--batch-size", "٣"],
        ["--batch-size", "1_000"],
        ["--threads", "9" * 10],
        ["--profile-steps", "²:³"],
        ["--profile-steps", "1:" + "9" * 5_000],
        ["--stall-timeout", "1e308"],
        ["--run-dir", ""],
        ["--data-dir", ""],
        ["--task", ""],
        ["--task", "\udcff"],
        ["--run-dir", "a\0b"],
        ["--data-dir", "x" * 5_000],
        ["--task" + "x" * 3_000_000],
        ["fly" * 1_000_000],
    ],
    ids=lambda arguments: " ".join(arguments)[:30].encode("ascii", "replace").decode().replace("\0", "0"),
)
def test_crafted_flags_are_refused(arguments):
    assert_refused(arguments)


def assert_refused(arguments):
    command = None if arguments[0].startswith("-") else arguments.pop(0)
    with pytest.raises((UsageError, DataError)) as caught:
        parse(command, arguments)
    message = str(caught.value)
    assert len(message) < LONGEST_MESSAGE
    assert len(message.splitlines()) == 1
