"""Every code block of README.md and docs/ runs as it is shown, or its page states why it does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, blocks
from launcher import run_job

pytestmark = pytest.mark.slow

LAUNCHERS = (
    ["launch/run", "horovodrun", "-np", "2", "python"],
    ["launch/run", "mpirun", "-np", "2", "python"],
    ["launch/run", "python"],
)
# Started as they are shown; other commands of hvdtrain are run in one job, because TensorFlow takes seconds to start.
AS_SHOWN = (
    "launch/run horovodrun -np 2 python train.py",
    "launch/run python -m hvdtrain doctor",
)


def folder_of(page: Path, folder: Path) -> Path:
    """A folder with what a reader of the page has: the checkout, and the files that the page shows."""
    own = folder / page.stem
    if not own.exists():
        own.mkdir()
        for name in ("launch", "examples"):
            (own / name).symlink_to(ROOT / name)
    for block in blocks():
        if block.page == page and block.title and not (own / block.title).exists():
            (own / block.title).write_text(block.text)
    return own


def arguments_of(words: list[str]) -> list[str]:
    """The arguments for hvdtrain of a command that starts it."""
    for launcher in LAUNCHERS:
        if words[: len(launcher) + 2] == [*launcher, "-m", "hvdtrain"]:
            return words[len(launcher) + 2 :]
    pytest.fail(f"no test runs {' '.join(words)!r}: mark the block with the reason, or add it to AS_SHOWN")


def test_programs_and_commands(tmp_path):
    plan, seen = [], set()
    runnable = [block for block in blocks() if block.not_run is None]
    for number, block in enumerate(runnable):
        if block.language == "python" and block.text not in seen:
            seen.add(block.text)
            own = tmp_path / f"program{number}"
            own.mkdir()
            program = own / (block.title or "program.py")
            program.write_text(block.text)
            plan.append({"name": block.name, "folder": str(own), "program": str(program)})
    programs = len(plan)
    for block in runnable:
        if block.language in ("sh", "bash", "console"):
            for words in block.commands:
                line = " ".join(words)
                if line not in AS_SHOWN and (line, block.page) not in seen:
                    seen.add((line, block.page))
                    own = folder_of(block.page, tmp_path)
                    plan.append({"name": f"{block.name} {line}", "folder": str(own), "arguments": arguments_of(words)})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, str(Path(__file__).with_name("doc_blocks.py")), str(tmp_path / "plan.json")]
    job = run_job([*command, str(tmp_path / "done.json")], ranks=2, timeout_s=240, cwd=tmp_path)
    assert job.code == 0, job.output[-8000:]
    assert json.loads((tmp_path / "done.json").read_text()) == [step["name"] for step in plan]
    assert programs >= 10
    assert len(plan) - programs >= 8


@pytest.mark.parametrize("line", AS_SHOWN)
def test_as_shown(line, tmp_path):
    page = next(block.page for block in blocks() if line.split() in block.commands)
    own = folder_of(page, tmp_path)
    done = subprocess.run(line.split(), cwd=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if "train.py" in line:
        assert (own / "model.keras").exists()


def test_the_first_command_of_the_readme(tmp_path):
    readme = PAGES[0].read_text()
    line = "launch/run horovodrun -np 2 python -m hvdtrain"
    assert f"\n{line}   # train on real data\n" in readme
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    done = subprocess.run(line.split(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "552 steps on 2 rank(s)" in done.stdout
    files = {each.name for each in (tmp_path / "runs" / "digits").iterdir()}
    named = {"config.json", "metrics.jsonl", "summary.json", "model.keras", "tensorboard", "checkpoints"}
    assert named <= files
    shutil.rmtree(tmp_path / "runs")
