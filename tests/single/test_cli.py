"""The command line on one process; bad input there costs no start of TensorFlow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.errors import UsageError


def test_defaults_come_from_the_task():
    config = cli.parse_train([])
    assert (config.task, config.batch_size, config.epochs) == ("digits", None, None)


def test_adasum_is_an_op():
    assert cli.parse_train(["--adasum"]).op == "adasum"
    assert cli.parse_train([]).op == "average"


def test_every_option_of_the_help_says_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.parse_train(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--task", "--batch-size", "--lr-scaling", "--steps-per-call", "--deterministic", "--config"):
        assert flag in text
    assert re.search(r"steps\s+between\s+log\s+lines\s+\(default:\s+10\)", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bach-size", "3"], "unrecognized arguments: --bach-size"),
        (["--batch", "3"], "unrecognized arguments: --batch"),
        (["--batch-size", "many"], "--batch-size must be a whole number. Received: 'many'"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError) as caught:
        cli.parse_train(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--steps", "-3"], 64, "--steps must be at least 1. Received: -3"),
        (["launch"], 64, "the command must be one of train, eval, bench, export, doctor. Received: 'launch'"),
        (["train", "--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder"),
        (["--timeline", "/nowhere/trace.json"], 65, "--timeline must be a file in an existing folder"),
        (["doctor", "--fast"], 64, "doctor takes no options"),
        (["eval", "--steps", "3"], 64, "unrecognized arguments: --steps 3"),
        (["eval", "--watch", "--checkpoint", "x"], 64, "--watch takes the latest checkpoint each time. Received: "),
        (["eval", "--batch-size", "0"], 64, "--batch-size must be at least 1"),
        (["export", "--format", "pickle"], 64, "--format must be one of keras, saved_model, onnx. Received: 'pickle'"),
        (["export", "--data-dir", "/nowhere"], 65, "--data-dir must be an existing folder"),
        (["--ema-ramp"], 64, "--ema-ramp is of --ema"),
        (["--lr-decay-steps", "3", "--lr-decay-epochs", "3"], 64, "exclude each other"),
    ],
)
def test_exit_codes(arguments, code, message, capsys):
    assert cli.main(arguments) == code
    assert message in capsys.readouterr().err
    assert "tensorflow" not in sys.modules or code  # told before TensorFlow was needed


def test_one_process_without_a_launcher(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "hvdtrain", "--steps", "25", "--warmup-steps", "5", "--lr-decay", "cosine"]
    command += ["--optimizer", "momentum", "--clip-norm", "1", "--accumulate", "2", "--run-dir"]
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
