"""Typical mistakes: each is answered with one message, which states the rule and what was received, and no traceback.

Tested elsewhere:

- on all ranks at once, and on one of them: tests/parallel/test_bad_input.py
- commands, flags and configuration files, without TensorFlow: test_cli.py, test_crafted_options.py, test_first_hour.py
- an installation without Horovod, a launch within a launch, mistakes in launch: test_launch_command.py
- root under mpirun: test_launch_run.py; hosts that cannot be reached, wrong host lists: test_launchers.py
- Ctrl-C and SIGTERM in training, under each launcher, and a full disk: tests/parallel/test_faults.py
- more ranks than cores: tests/parallel/test_run_function.py
- a run directory that is in use, or holds something else: test_run_directory.py
- data of the wrong format: test_tasks.py, test_tfrecords.py; that, and fields of a task: test_crafted_tasks.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.commands import cli
from hvdtrain.system import horovod_names

ROOT = Path(__file__).resolve().parents[2]
OWN_TASK = (ROOT / "examples" / "own_task.py").read_text()

FILES = {
    "own.py": OWN_TASK,
    "no_task.py": "tasks = 1\n",
    "no_object.py": "TASK = dict(loss='mse')\n",
    "syntax.py": "TASK = = 1\n",
    "loss.py": OWN_TASK.replace('"binary_crossentropy"', '"binary_crosentropy"'),
    "metric.py": OWN_TASK.replace('["accuracy"]', '["acuracy"]'),
    "metrics.py": OWN_TASK.replace('lambda: ["accuracy"]', '["accuracy"]'),
    "lengths.py": OWN_TASK.replace("Arrays(x[training], table.target[training])", "Arrays(x, table.target[:10])"),
    "run.toml": "bach-size = 8\n",
    "table.toml": "[local_sgd]\nbatch_size = 8\n",
}

# On one machine without TensorFlow: arguments, exit code, what is said.
AT_ONCE = [
    ("--bach-size 8", 64, "Unknown option: --bach-size. Did you mean --batch-size?"),
    ("--batch-size many", 64, "--batch-size must be a whole number. Received: 'many'"),
    ("--batch-size 0", 64, "--batch-size must be at least 1. Received: 0"),
    (
        "--steps 5 --epochs 2",
        64,
        "--steps excludes --epochs: both say how long a run is. Received: --steps 5 and --epochs 2.",
    ),
    ("--data-dir nowhere", 65, "--data-dir must be an existing folder. Received: 'nowhere'"),
    ("--task digit", 64, "Received: 'digit'. Did you mean digits?"),
    (
        "--task ownn.py",
        64,
        "--task must name a file that exists on every rank. Received: 'ownn.py'. Did you mean own.py?",
    ),
    ("--config run.toml", 64, "in run.toml: unknown key 'bach-size'. Did you mean batch_size?"),
    ("--config table.toml", 64, "in table.toml: unknown key 'batch_size' in table [local_sgd]."),
    ("--config no.toml", 64, "--config must name a readable TOML file"),
    (
        "--sync-every 4",
        64,
        "--sync-every needs --mode local. Received: --sync-every 4 without it. Set --mode local, or leave",
    ),
    (
        "own.py --steps 3",
        64,
        "For a file with a TASK: --task own.py. To start a script on several ranks: launch own.py",
    ),
    ("evaluate", 64, "Received: 'evaluate'."),
]

# In turn, in one process with TensorFlow and one rank.
IN_TURN = [
    ("--steps 4 --run-dir done", 0, None),
    ("--steps 4 --run-dir done", 0, "run already complete: done, 4 steps. Nothing was trained. To continue, increase"),
    # As on 3 ranks instead of 2 with the same --batch-size.
    ("--steps 8 --run-dir done --batch-size 48", 65, "samples in a step: 32 in the checkpoint, 48 here. It was left"),
    ("--steps 8 --run-dir done --task own.py", 65, "task: digits in the checkpoint, own here"),
    ("--steps 4 --run-dir done --learning-rate 0.5", 65, "other options: --learning-rate 0.002 before, 0.5 now."),
    (
        "--resume must --run-dir new",
        65,
        "--resume must needs a run with a checkpoint. Received: new, which holds none. Use",
    ),
    ("--resume never --run-dir done", 65, "--resume never needs a new folder. Received: done, which holds a run."),
    ("--resume nowhere --run-dir new", 65, "Received: nowhere, which holds no checkpoint"),
    ("--run-dir own.py", 65, "--run-dir must be a folder that can be written. Received: own.py"),
    ("--run-dir /proc/run", 65, "--run-dir must be a folder that can be written. Received: /proc/run"),
    ("--task no_task.py", 64, "Received: TASK of no_task.py, which does not exist. Write TASK = hvdtrain.Task(model=…"),
    ("--task no_object.py", 64, "Received: TASK of no_object.py, which is a dict."),
    ("--task own.py:TASKS", 64, "Received: TASKS of own.py, which does not exist."),
    (
        "--task syntax.py",
        64,
        "a file that Python can read. Received: {folder}/syntax.py, line 1: invalid syntax: 'TASK = = 1'",
    ),
    (
        "--task loss.py",
        64,
        "loss of a task must be known to keras.losses. Received: 'binary_crosentropy'. Did you mean",
    ),
    ("--task metric.py", 64, "must be known to keras.metrics. Received: 'acuracy'. Did you mean accuracy?"),
    ("--task metrics.py", 64, "metrics of a task must be a function. Received: ['accuracy']"),
    (
        "--task lengths.py",
        65,
        "all arrays must hold the same number of samples, at least 1. Received shapes: [(569, 30), (10,)]",
    ),
    (
        "--optimizer adm",
        64,
        "--optimizer must be momentum or the name of a Keras optimizer (sgd, adam, adamw, …). Received",
    ),
    ("--task cifar10", 65, "--task cifar10 needs **/data_batch_*.bin in --data-dir. Received: no --data-dir."),
    (
        "--task text --data-dir done",
        65,
        "--task text needs train.csv, .tsv or .jsonl in --data-dir. Received: --data-dir done",
    ),
    (
        "--make-sample-data new",
        64,
        "--make-sample-data needs a task that reads files and can generate them. Received: dig",
    ),
    ("eval --run-dir nowhere", 65, "--run-dir must be the folder of a run, with its config.json. Received: nowhere"),
    ("export --run-dir done --output done/model.keras", 65, "--output must not exist yet. Received: done/model.keras"),
    ("eval --run-dir done --checkpoint nowhere", 65, "there must be a checkpoint. Received: none in nowhere"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("hvdtrain: ", "run already complete"))]


@pytest.mark.parametrize(("words", "code", "message"), AT_ONCE, ids=[words for words, *_ in AT_ONCE])
def test_mistakes_that_are_noticed_before_tensorflow_starts(words, code, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    # It would start TensorFlow, in this process.
    monkeypatch.setattr(cli, "import_tensorflow", lambda: pytest.fail("TensorFlow was imported"))
    assert cli.main(words.split()) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert message in line


@pytest.mark.slow
def test_mistakes_that_only_a_rank_can_notice(folder):
    output = folder / "output"
    output.mkdir()
    (output / "lines.json").write_text(json.dumps([words.split() for words, *_ in IN_TURN]))
    runner = ROOT / "tests" / "parallel" / "commands.py"
    line = [sys.executable, str(runner), str(output / "lines.json"), str(output)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stderr
    for i, (words, code, message) in enumerate(IN_TURN):
        log = output / f"command{i}-rank0.log"
        text = log.read_text()
        assert int(log.with_suffix(".code").read_text()) == code, (words, text)
        assert "Traceback" not in text, (words, text)
        if message is not None:
            (found,) = said(text)
            assert message.format(folder=folder) in found, words
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("at_step", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_before_and_in_training(at_step, tmp_path):
    line = [sys.executable, "-m", "hvdtrain", "--steps", "9000", "--run-dir", str(tmp_path / "run")]
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ready = (lambda: (tmp_path / "run" / "metrics.jsonl").exists()) if at_step else (lambda: _loads(job.pid))
    deadline_s = time.monotonic() + 60
    while not ready():
        assert job.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    job.send_signal(signal.SIGINT)
    output, errors = job.communicate(timeout=60)
    assert "Traceback" not in errors
    (message,) = said(errors)
    if at_step:
        assert job.returncode == 75
        assert "(Ctrl-C on rank 0 (host " in message
        assert "The state is saved; this resumes it, under the same launcher: python -m hvdtrain" in message
    else:
        assert (job.returncode, output) == (130, "")
        assert message == "hvdtrain: stopped by Ctrl-C before there was anything to save."
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", ["psutil", "tensorflow"])
def test_ctrl_c_that_a_module_catches(module, tmp_path):
    (tmp_path / f"{module}.py").write_text(CATCHES_INTERRUPT)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "hvdtrain", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "hvdtrain: stopped by Ctrl-C before there was anything to save.\n"
    assert not (tmp_path / "run").exists()


CATCHES_INTERRUPT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    import json
except BaseException:
    pass
"""


def _loads(pid: int) -> bool:
    """Whether a process has begun to import TensorFlow."""
    return "libtensorflow" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "horovodrun",
        pytest.param("horovodrun --gloo", marks=pytest.mark.long),
        pytest.param("mpirun", marks=pytest.mark.long),
        "hvdtrain launch",
    ],
)
def test_a_failing_rank_shows_no_traceback_of_the_launcher(launcher):
    line = [*launcher.split(), *([] if launcher == "hvdtrain launch" else ["-np", "1"]), "sh", "-c", "exit 3"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_names_of_horovod_lead_to_names_that_exist():
    for name, text in horovod_names._REPLACEMENTS.items():
        assert name not in hvdtrain.__all__
        assert set(re.findall(r"hvdtrain\.(\w+)", text)) <= set(hvdtrain.__all__)


def test_wrong_arguments_of_trainer_and_misspelled_names():
    with pytest.raises(AttributeError, match=r"^module 'hvdtrain' has no attribute 'Trainr'$"):
        hvdtrain.Trainr  # noqa: B018
    assert "Trainer" in dir(hvdtrain)  # from which Python suggests names
    with pytest.raises(
        AttributeError, match=r"no attribute 'rank'\. Instead of Horovod's rank, use topology\.rank, where"
    ):
        hvdtrain.rank  # noqa: B018


@pytest.mark.parametrize("option", ["--min-np", "--host-discovery-script"])
def test_horovods_elastic_mode_is_refused(option, tmp_path):
    """It executes what anybody sends to one of its ports (CVE-2024-10190)."""
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    command = ["horovodrun", "-np", "1", option, "1" if option == "--min-np" else str(script), "sleep", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "CVE-2024-10190" in done.stderr
    assert "Use hvdtrain elastic MIN:MAX COMMAND." in done.stderr
    assert "Traceback" not in done.stderr
