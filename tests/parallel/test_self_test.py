"""hvdtrain test, as a user runs it after an installation."""

import subprocess
import sys

import pytest
from launcher import LONG

import hvdtrain
from hvdtrain.commands import cli, self_test
from hvdtrain.errors import HvdtrainError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("flag", ["--mpi", LONG("--gloo")])
def test_reports_what_works(flag):
    done = subprocess.run([sys.executable, "-m", "hvdtrain", "test", flag], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "hvdtrain test: starting 2 ranks on this machine"
    launcher = "Open MPI" if flag == "--mpi" else "horovodrun --gloo"
    assert lines[1].startswith(f"  2 ranks, started by {launcher}, rank 0 on ")
    assert lines[2:5] == [
        "  reduction: the sum of 100,000 numbers over all ranks is correct",
        "  broadcast: all ranks have rank 0's weights",
        "  training, checkpoint, resuming at step 4: the same weights as an uninterrupted run, on all ranks",
    ]
    assert lines[5].startswith("hvdtrain works here (")


def test_reports_what_does_not_work(monkeypatch, capsys):
    def wrong():
        raise HvdtrainError("the sum is wrong")

    monkeypatch.setattr(self_test, "_check", wrong)
    assert cli.main(["test"]) == 1
    error = capsys.readouterr().err
    assert "hvdtrain: 2 ranks must train together on this machine. Received: HvdtrainError: the sum is wrong" in error
    assert "rank 0 of 2:" in error or "rank 1 of 2:" in error
    assert error.endswith("python -m hvdtrain doctor checks the installation.\n")
    assert cli.main(["test", "--mpi", "--gloo"]) == 64


def test_each_check_notices_what_is_broken():
    def check_broken():
        from unittest import mock

        from hvdtrain.commands import self_test_checks

        messages = []
        for name, broken in {
            "np.array_equal": lambda *arrays: False,
            "broadcast": lambda model: None,
            "weights_sha256": lambda model: "equal",
            "_train": lambda folder, steps: {"resumed_from": None, "weights_sha256": "equal"},
        }.items():
            with mock.patch(f"hvdtrain.commands.self_test_checks.{name}", broken):
                try:
                    self_test_checks.check_all()
                except HvdtrainError as error:
                    messages.append(str(error))
        return messages

    expected = [
        "the sum over ranks of 100,000 numbers is wrong",
        "ranks differ after the broadcast",
        "ranks with different seeds have equal weights before the broadcast",
        "the run did not resume from its checkpoint",
    ]
    assert hvdtrain.run(check_broken, timeout_s=120) == [expected, expected]
