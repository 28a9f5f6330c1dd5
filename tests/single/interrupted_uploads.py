"""Run by test_interrupted_upload.py: kills an upload before, or in the middle of, each of its operations in turn.

S3, whose clients take long to start, is killed at every third, and has no half files.

``python interrupted_uploads.py CHECKPOINTS URL FOLDER``: CHECKPOINTS holds those of steps 1 and 2, of which the store
keeps one. Prints a JSON object: the operations, and how often each checkpoint was the latest.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from hvdtrain.system import tensorflow_start

tensorflow_start.import_tensorflow()

import s3fs  # noqa: E402, F401

from hvdtrain.checkpoint import storage  # noqa: E402
from hvdtrain.checkpoint.folders import StoredFolder  # noqa: E402
from hvdtrain.stores.store import Store  # noqa: E402

OPERATIONS = ("upload", "delete", "write", "copy")


def publish_killed_at(number: int, url: str, local: Path, *, half: bool) -> list[str] | None:
    """Publishes steps 1 and 2 in a child, which is killed at an operation of the second; None, or all operations."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        folder = StoredFolder(url, local)
        folder.claim()
        folder.publish(1, keep=1)
        done: list[str] = []
        for name in OPERATIONS:
            original = getattr(Store, name)

            def counted(self, *arguments, name=name, original=original):
                done.append(name)
                if len(done) == number:
                    if half and name == "upload":
                        # A store whose files appear before they are complete.
                        content = arguments[0].read_bytes()
                        self.write(arguments[1], content[: len(content) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, *arguments)

            setattr(Store, name, counted)
        folder.publish(2, keep=1)
        os.write(writer, json.dumps(done).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    _, status = os.waitpid(child, 0)
    assert bool(text) == os.WIFEXITED(status), status
    return json.loads(text) if text else None


def latest(checkpoints: Path, url: str, folder: Path, *, half: bool) -> int:
    """The step of the checkpoint that another machine finds, which has the content of one that was saved."""
    stored = StoredFolder(url, folder)
    stored.fetch()
    (found,) = storage.checkpoints_in(folder)
    for file in storage.listed_files(found):
        assert (found / file).read_bytes() == (checkpoints / found.name / file).read_bytes(), (found, file)
    # Checksums would find a checkpoint that is complete too early or too long; the order of operations leaves none.
    for name in Store(url).files():
        checkpoint, _, file = name.partition("/")
        if file == storage.SUMS and not half:
            stored.fetch_one(checkpoint)
    return storage.step_of(found)


def main() -> None:
    checkpoints, url, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    outcomes: dict[str, int] = {}
    operations: list[str] = []
    points: list[tuple[str, Path, bool]] = []
    for half in (False, True)[: 1 if url.startswith("s3:") else 2]:
        number, done = 0, None
        while done is None:
            number += 1 if url.startswith("file:") else 3
            name = f"{number}-{half}"
            local, place = folder / f"local-{name}", f"{url}/{name}"
            shutil.copytree(checkpoints, local)
            done = publish_killed_at(number, place, local, half=half)
            points.append((place, folder / f"other-{name}", half))
        operations = done
    # After all forks: a client of S3 has a thread, without which they would wait.
    for place, other, half in points:
        step = str(latest(checkpoints, place, other, half=half))
        outcomes[step] = outcomes.get(step, 0) + 1
    print(json.dumps({"operations": operations, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
