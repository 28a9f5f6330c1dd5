"""The code blocks of README.md and docs/: lists them, and runs those of a plan on every rank of one job.

launch/run python tests/parallel/doc_blocks.py   # lists all blocks, with the reason for those that are not run
"""

import dataclasses
import hashlib
import json
import os
import re
import runpy
import shlex
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_RUN = ("python", "sh", "bash", "console", "toml")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\s*$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: (.+) -->$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    title: str | None
    """The name of the file that the block shows."""
    not_run: str | None
    """Why it is not run."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks() -> list[Block]:
    """All blocks in a language that can be run, in the order of the pages."""
    found = []
    for page in PAGES:
        lines = page.read_text().splitlines()
        start: re.Match[str] | None = None
        for number, line in enumerate(lines, start=1):
            fence = _FENCE.match(line)
            if start is None:
                start, first = fence, number
                assert fence or "```" not in line, f"{page}:{number}: {line}"
            elif line.strip() == "```":
                reason = _NOT_RUN.match(lines[first - 2]) if first > 1 else None
                text = "\n".join(each.removeprefix(start["indent"]) for each in lines[first : number - 1]) + "\n"
                if start["language"] in _RUN:
                    block = Block(page, first, start["language"], text, start["title"], reason and reason[1])
                    found.append(block)
                start = None
        assert start is None, f"{page}:{first}: the block does not end"
    return found


def run_plan(plan: list[dict], report: Path) -> None:
    """Runs Python programs and command lines of hvdtrain; all ranks must reach the end of each with equal models."""
    import keras

    import hvdtrain
    from hvdtrain.commands.cli import main
    from hvdtrain.distributed import runtime

    rank = hvdtrain.init(seed=1).rank
    collectives = runtime.current().collectives
    done = []
    for step in plan:
        keras.utils.clear_session()
        os.chdir(step["folder"])
        begin = time.monotonic()
        if "program" in step:
            # For the page about data, which reads these files.
            if rank == 0 and "train-*.tfrecord" in Path(step["program"]).read_text():
                _write_records(Path("train-0.tfrecord"))
            collectives.barrier()
            try:
                model = runpy.run_path(step["program"], run_name="__main__").get("model")
            except SystemExit as end:
                raise RuntimeError(f"the program ended itself with {end.code}") from end
            digest = _digest(model) if isinstance(model, keras.Model) else None
            digests = collectives.allgather(digest)
            assert len(set(digests)) == 1, f"the models of the ranks differ: {digests}"
        else:
            code = main(step["arguments"])
            assert code == 0, f"exit code {code}"
        collectives.barrier()
        done.append(step["name"])
        if rank == 0:
            print(f"--- {step['name']}: {time.monotonic() - begin:.1f} s", flush=True)
    if rank == 0:
        report.write_text(json.dumps(done))


def _write_records(path: Path) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as file:
        for value in range(5):
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
            file.write(tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString())


def _digest(model) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.trainable_variables)).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for each in blocks():
            print(f"{each.name:32} {each.language:8} {f'not run: {each.not_run}' if each.not_run else 'run'}")
    else:
        try:
            run_plan(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            # Without waiting for ranks that may wait for this one.
            os._exit(1)
