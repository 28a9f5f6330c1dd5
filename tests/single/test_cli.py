"""The command line on one process; bad input there costs no start of TensorFlow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.commands import cli
from hvdtrain.errors import UsageError

pytestmark = pytest.mark.usefixtures("as_a_command")


def parse_train(arguments):
    return cli.parse(None, arguments)


def test_options_that_were_not_set_are_left_to_the_task():
    config = parse_train([])
    assert (config.task, config.training.epochs, config.optimizer.optimizer) == ("digits", None, None)
    assert config.explicitly_set == frozenset()
    # Also if the value is the default.
    assert parse_train(["--log-every", "10", "--no-overlap"]).explicitly_set == {"log_every", "overlap"}


def test_the_last_of_several_flags_wins():
    assert parse_train(["--steps", "3", "--steps", "4"]).training.steps == 4


def test_help_shows_the_options_that_most_runs_need(capsys):
    pages = {}
    for arguments in (["--help"], ["train", "--help"], ["bench", "-h"], ["eval", "--help"]):
        command = arguments[0] if len(arguments) == 2 else None
        with pytest.raises(SystemExit):
            cli.parse(command, arguments[-1:])
        pages[command] = capsys.readouterr().out
    assert "─ Commands ─" in pages[None]
    assert "--task" not in pages[None]
    assert "Options of a command: python -m hvdtrain train --help" in pages[None]
    for command in ("train", "bench"):
        assert len(pages[command].splitlines()) < 60
        assert "--batch-size" in pages[command]
        assert "--wait-free" not in pages[command]
        assert f"All options: python -m hvdtrain {command} --help all" in pages[command]
    assert "--watch" in pages["eval"]
    assert "All options" not in pages["eval"]
    # Line breaks of the source are none of the page.
    assert "mnist-softmax, tabular, text, synthetic-resnet50,\n" not in re.sub(r" *│\n│ *", " ", pages["train"])


def test_every_option_of_the_help_states_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_train(["--help", "all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--task", "--batch-size", "--lr-scaling", "--steps-per-execution", "--deterministic", "--config"):
        assert flag in text
    for group in ("Task", "Training", "Optimizer", "Local SGD", "Checkpoints", "Guards", "Fault tolerance"):
        assert f"─ {group} " in text
    assert re.search(r"Steps between log lines\. Unless it is set.*?\[default: 10\]", text, re.DOTALL)


def test_version(capsys):
    with pytest.raises(SystemExit):
        parse_train(["--version"])
    assert capsys.readouterr().out.strip() == hvdtrain.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bach-size", "3"], "Unknown option: --bach-size. Did you mean --batch-size? See python -m hvdtrain train"),
        (["--batch", "3"], "Unknown option: --batch. Did you mean --batch-size?"),
        (["--lr", "1"], "Unknown option: --lr. Did you mean --learning-rate?"),
        (["--save-every=4"], "Unknown option: --save-every. Did you mean --checkpoint-every?"),
        (["--verbose"], "Unknown option: --verbose. See python -m hvdtrain train --help"),
        (["--np", "2"], "The number of ranks is set where they are started: hvdtrain launch --np 2 python -m hvdtrain"),
        (["--no-overlapp"], "Did you mean --no-overlap?"),
        (["--batch-size", "many"], "--batch-size must be a whole number. Received: 'many'"),
        (["--batch-size", "2.5"], "--batch-size must be a whole number. Received: '2.5'"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number"),
        (["--learning-rate", "fast"], "--learning-rate must be a number. Received: 'fast'"),
        (["--op", "median"], "--op must be one of average, sum, adasum. Received: 'median'"),
        (["--overlap=maybe"], "--overlap"),
        (["extra"], "extra"),
        (["--steps"], "--steps requires an argument"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError) as caught:
        parse_train(arguments)
    assert message in str(caught.value)


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'batch-size = 16\ndeterministic = true\n[learning_rate]\nlearning_rate = 1\n[optimizer]\noptimizer = "sgd"\n'
    )
    config = parse_train(["--config", str(file), "--batch-size", "8"])
    found = (config.training.batch_size, config.learning_rate.learning_rate, config.optimizer.optimizer)
    assert (*found, config.runtime.deterministic) == (8, 1.0, "sgd", True)
    assert config.explicitly_set == {"batch_size", "learning_rate", "optimizer", "deterministic"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 3", "unknown key 'batchsize'. Did you mean batch_size? Known keys: "),
        ("lr = 0.1", "unknown key 'lr'. Did you mean learning_rate? Known keys: "),
        ("[local_sgd]\nbatch_size = 3", "unknown key 'batch_size' in table [local_sgd]"),
        ("batch-size = 'three'", "--batch-size must be a whole number. Received: 'three'"),
        ("batch-size = 2.5", "--batch-size must be a whole number. Received: 2.5"),
        ("steps = true", "--steps must be a whole number. Received: True"),
        ("deterministic = 1", "--deterministic must be true or false. Received: 1"),
        ("task = 5", "--task must be a string. Received: 5"),
        ("op = 'median'", "--op must be one of average, sum, adasum. Received: 'median'"),
        ("this is not TOML", "must be TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(text, message, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse_train(["--config", str(file)])
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match="--config must name a readable TOML file"):
        parse_train(["--config", "/nowhere/run.toml"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--steps", "-3"], 64, "--steps must be at least 1. Received: -3"),
        (
            ["trian"],
            64,
            "Received: 'trian'. Did you mean train?",
        ),
        (["--task", "digit"], 64, "--task must name a task (digits, cifar10, "),
        (["--task", "digit"], 64, "Received: 'digit'. Did you mean digits?"),
        (["--task", "pyproject"], 64, "or a file.py. Received: 'pyproject'."),
        (["bench", "--task", "nowhere/task.py"], 64, "--task must name a file that exists on every rank. Received: "),
        (["--task", "examples/own_tsak.py"], 64, "Received: 'examples/own_tsak.py'. Did you mean own_task.py?"),
        (
            ["--task", "no_module.tasks:TASK"],
            64,
            "a module that can be imported. Received: 'no_module.tasks' (no module",
        ),
        (["--task", ".:TASK"], 64, "--task must name a module that can be imported. Received: '.'"),
        (["train", "--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder"),
        (["--timeline", "/nowhere/trace.json"], 65, "--timeline must be a file in an existing folder"),
        (["doctor", "--fast"], 64, "doctor takes no options"),
        (["eval", "--steps", "3"], 64, "Unknown option: --steps"),
        (["eval", "--watch", "--checkpoint", "x"], 64, "--watch excludes --checkpoint"),
        (["eval", "--batch-size", "0"], 64, "--batch-size must be at least 1"),
        (["export", "--format", "pickle"], 64, "--format must be one of keras, saved_model, onnx. Received: 'pickle'"),
        (["export", "--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder"),
        (["--ema-ramp"], 64, "--ema-ramp needs --ema"),
        (["--lr-decay-steps", "3", "--lr-decay-epochs", "3"], 64, "--lr-decay-steps excludes --lr-decay-epochs"),
    ],
)
def test_exit_codes(arguments, code, message, capsys):
    assert cli.main(arguments) == code
    assert message in capsys.readouterr().err


def test_a_mistake_costs_no_start_of_tensorflow(tmp_path):
    (tmp_path / "own_task.py").touch()
    code = """
import sys
from hvdtrain.commands import cli
for words in ("--task digit", "--task own_task", "--task no.py", "--task no.such:TASK", "--bach-size 3", "lunch"):
    assert cli.main(words.split()) == 64
print([name for name in ("tensorflow", "keras", "horovod") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr
    assert "Received: 'own_task'. Did you mean own_task.py?" in done.stderr


@pytest.mark.slow
def test_one_process_without_a_launcher(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "hvdtrain", "--steps", "25", "--warmup-steps", "5", "--lr-decay", "cosine"]
    command += ["--optimizer", "momentum", "--clip-norm", "1", "--gradient-accumulation-steps", "2", "--run-dir"]
    for place, expected in ((tmp_path / "other", "done: 25 steps"), (run_dir, "done: 25 steps"), (run_dir, "complete")):
        done = subprocess.run([*command, str(place)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert expected in done.stdout
    first, second = (json.loads((place / "summary.json").read_text()) for place in (tmp_path / "other", run_dir))
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["steps"] == 25
    # The model opens where neither Horovod nor hvdtrain is installed.
    opened = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['horovod'] = sys.modules['hvdtrain'] = None\n"
            f"import keras, hashlib; model = keras.models.load_model({str(run_dir / 'model.keras')!r})\n"
            "print(hashlib.sha256(b''.join(v.numpy().tobytes() for v in model.weights)).hexdigest())",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path("/"),
    )
    assert opened.stdout.strip() == second["weights_sha256"], opened.stderr


AFTER_THE_END = """
import os, signal, sys
from hvdtrain.commands import cli
try:
    code = cli.main(sys.argv[1:])
finally:
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [(["--task", "digits", "--steps", "1"], 0), (["--task", "mnist"], 65)])
def test_a_signal_after_the_last_line_does_not_change_the_exit_code(arguments, code, tmp_path):
    command = [sys.executable, "-c", AFTER_THE_END, *arguments, "--run-dir", str(tmp_path / "run")]
    assert subprocess.run(command, timeout=60).returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["--task", "digits", "--steps", "1"]])
def test_output_that_cannot_be_written_does_not_change_the_exit_code(arguments, tmp_path):
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
