"""What a new user calls first: init, compare and completion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands import cli
from hvdtrain.runs.run_record import read_run


def started(*words: object, code: int = 0, cwd: Path | None = None) -> str:
    line = [sys.executable, "-m", "hvdtrain", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_task_that_init_writes_trains_as_it_is_and_on_own_data(tmp_path):
    import numpy as np

    said = started("init", "my_task.py", cwd=tmp_path)
    assert said == (
        "my_task.py: a task to start from. Train it: hvdtrain launch --np 2 python -m hvdtrain --task my_task.py\n"
    )
    before = (tmp_path / "my_task.py").read_text()
    assert "FILE" not in before
    started("--task", "my_task.py", "--run-dir", "run", cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]["accuracy"] > 0.95
    assert "which exists. It was left untouched." in started("init", "my_task.py", code=65, cwd=tmp_path)
    assert (tmp_path / "my_task.py").read_text() == before
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "samples.npz", x=np.zeros((50, 2)), y=np.zeros(50, int))
    own = ["--data-dir", "data", "--steps", "2", "--run-dir", "own"]
    assert "2 steps per epoch" in started("--task", "my_task.py", *own, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["init"], 64, "FILE requires an argument"),
        (["init", "task.txt"], 64, "FILE must end in .py. Received: 'task.txt'"),
        (
            ["init", "/nowhere/task.py"],
            65,
            "FILE must be in a folder that can be written. Received: '/nowhere/task.py'",
        ),
        (["compare"], 64, "RUN is missing. For example: hvdtrain compare runs/digits runs/cifar10"),
        (
            ["compare", "/nowhere"],
            65,
            "RUN must be a run directory. Received: '/nowhere', which has none of summary.json",
        ),
        (["compare", ".", "--plot", "x.txt"], 64, "--plot must end in .png, .svg, .pdf. Received: 'x.txt'"),
        (["completion", "tcsh"], 64, 'Invalid value "tcsh" for SHELL. Choose from: "bash", "zsh", "fish".'),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, code, message, capsys):
    assert cli.main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def make_runs(folder: Path) -> list[Path]:
    """A complete run, one that runs, one without elapsed seconds, and a damaged one."""
    complete, running, untimed, damaged = runs = [
        folder / name for name in ("complete", "running", "untimed", "damaged")
    ]
    for path in runs:
        path.mkdir()
    summary = {
        **{"task": "digits", "mode": "sync", "ranks": 2, "steps": 552, "loss": 0.0018, "wall_seconds": 2.0},
        **{"eval": {"loss": 0.05, "accuracy": 0.98}, "examples_per_second": 16598.4, "communication_fraction": 0.153},
    }
    (complete / "summary.json").write_text(json.dumps(summary))
    times = [{"step": step, "loss": 1 / step, "elapsed_seconds": step / 100} for step in (10, 552)]
    lines = [{"event": "train", **each} for each in times]
    (complete / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (running / "config.json").write_text('{"task": "cifar10", "mode": "local"}')
    lines = [
        {"event": "start", "time": 100.0, "task": "cifar10, 1 parameter"},
        {"event": "train", "time": 102.0, "step": 10, "loss": 2.5, "examples/s": 50.0, "elapsed_seconds": 1.5},
        {"event": "eval", "time": 103.0, "step": 10, "loss": 2.25, "elapsed_seconds": 2.0},
    ]
    (running / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"event": "tr')
    lines = [{"event": "train", "time": 50.0, "step": 5, "loss": 1.0}, {"event": "end", "time": 53.0, "step": 5}]
    (untimed / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (damaged / "summary.json").write_text('{"steps": "many", "loss": NaN, "eval": [1], "ranks": true, "task": 5')
    (damaged / "metrics.jsonl").write_text(
        '{"event": "train", "step": "x", "loss": null}\n{"event": "eval", "loss": []}\n'
    )
    return runs


def test_compare_reads_incomplete_runs(tmp_path):
    runs = make_runs(tmp_path)
    text = started("compare", *(path.name for path in runs), cwd=tmp_path)
    header, *rows = [" ".join(line.split()) for line in text.splitlines()]
    assert header == "run task mode ranks steps loss eval loss eval accuracy examples/s time communication"
    assert rows == [
        "complete digits sync 2 552 0.0018 0.05 0.98 16598 5.5 s 15 %",
        "running cifar10 local - 10 (unfinished) 2.5 2.25 - 50 2.0 s -",
        "untimed - - - 5 (unfinished) 1 - - - - -",
        "damaged - - - - (unfinished) - - - - - -",
    ]
    assert len({len(line) for line in text.splitlines()}) == 1, "the columns are aligned"


def test_compare_draws_losses_against_steps_and_time(tmp_path, capsys):
    runs = [read_run(path) for path in make_runs(tmp_path)]
    assert runs[1].points("train", "step", "elapsed_seconds", "loss") == [[10], [1.5], [2.5]]
    assert runs[1].points("eval", "step", "loss") == [[10], [2.25]]
    assert runs[2].points("train", "step", "loss") == [[5], [1.0]]
    assert runs[2].points("train", "elapsed_seconds", "loss") == [[], []]
    assert runs[3].points("train", "step", "loss") == [[], []]
    plot = tmp_path / "loss.png"
    assert cli.main(["compare", *(run.name for run in runs), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"written: {plot}" in capsys.readouterr().out
    assert cli.main(["compare", str(runs[0].name), "--plot", str(tmp_path / "no" / "loss.png")]) == 65
    assert "--plot must be a file that can be written. Received: " in capsys.readouterr().err


def test_compare_and_init_need_neither_tensorflow_nor_matplotlib(tmp_path):
    make_runs(tmp_path)
    code = f"""
import sys
sys.modules["matplotlib"] = None
from hvdtrain.commands import cli
assert cli.main(["compare", {str(tmp_path / "complete")!r}, "--plot", "x.png"]) == 0
assert cli.main(["init", {str(tmp_path / "task.py")!r}]) == 0
assert cli.main(["completion", "bash"]) == 0
print([name for name in ("tensorflow", "keras", "horovod", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "x.png was not drawn: figures need matplotlib. Install it: HVDTRAIN_EXTRAS=plot launch/run …" in done.stdout
    assert done.stdout.endswith("[]\n")


COMPLETE = """
eval "$({python} -m hvdtrain completion bash)"
complete -p hvdtrain
for words in 'hvdtrain --batch-s' 'hvdtrain bench --block' 'hvdtrain co' 'hvdtrain train --lr-decay exp'; do
    COMP_WORDS=($words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
    _hvdtrain
    echo "${{COMPREPLY[*]}}"
done
"""


def test_bash_completes_commands_options_and_choices():
    script = COMPLETE.format(python=sys.executable)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "complete -F _hvdtrain hvdtrain",
        "--batch-size",
        "--blocks --block-seconds",
        "compare completion",
        "exponential",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_name_commands_and_options(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("hvdtrain", "compare", "batch-size", "max-spread", "exponential"):
        assert word in script
