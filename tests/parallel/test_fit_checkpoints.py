"""``model.fit`` that is stopped or killed, and started again: it ends with the same bits, history and callbacks."""

import json
import random
import sys
from pathlib import Path

import pytest
from launcher import LONG, run_job

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("fit_program.py")


def fit(folder: Path, *, ranks: int = 2, launcher: str = "mpirun", **spec):
    result = folder.parent / "result.json"
    result.unlink(missing_ok=True)
    text = json.dumps({"result": str(result), **spec})
    done = run_job([sys.executable, str(PROGRAM), str(folder), text], ranks=ranks, launcher=launcher, timeout_s=120)
    return done, json.loads(result.read_text()) if result.exists() else None


@pytest.mark.parametrize(
    ("data", "ranks", "launcher"),
    [
        ("arrays", 2, "mpirun"),
        LONG("batches", 1, ""),
        LONG("batches", 2, "horovodrun --gloo"),
        LONG("dataset", 2, "mpirun"),
        LONG("repeated", 2, "mpirun"),
        LONG("arrays", 4, "mpirun"),
    ],
)
def test_a_stopped_and_a_killed_fit_resume_bit_identically(data, ranks, launcher, tmp_path):
    spec = {"data": "dataset", "repeats": True} if data == "repeated" else {"data": data}
    # Saved between two micro-batches of an update, whose gradients each rank has by itself.
    accumulate = 2 if data == "arrays" else None
    how = {"ranks": ranks, "launcher": launcher, "every": 5, "accumulate": accumulate, **spec}
    done, expected = fit(tmp_path / "uninterrupted", **how)
    assert done.code == 0, done.output
    folder = tmp_path / "run"
    stopped, _ = fit(folder, fault="SIGTERM", at=17, **how)
    # horovodrun --gloo returns 1 for any failure.
    assert stopped.code == (1 if launcher.endswith("gloo") else 75), stopped.output
    assert "The state is saved; start the same command again to resume." in stopped.output
    killed, _ = fit(folder, fault="SIGKILL", at=33, **how)
    assert killed.code not in (0, 75), killed.output
    if ranks > 1:
        assert f"lost connection to rank {ranks - 1} (host " in killed.output
        assert "before its first step" not in killed.output
    resumed, found = fit(folder, **how)
    assert resumed.code == 0, resumed.output
    assert "resumed after step " in resumed.output
    assert found == expected
    # Once more: nothing remains to be done.
    again, found = fit(folder, **how)
    assert again.code == 0, again.output
    assert {**found, "drawn": ""} == {**expected, "drawn": ""}


@pytest.mark.long
def test_a_fit_that_is_killed_at_20_random_moments(tmp_path):
    done, expected = fit(tmp_path / "uninterrupted", every=3)
    assert done.code == 0, done.output
    moments = random.Random(0)
    for number in range(20):
        folder = tmp_path / f"run {number}"
        done, _ = fit(folder, every=3, fault="SIGKILL", at=moments.randrange(1, 80))
        assert done.code != 0, done.output
        resumed, found = fit(folder, every=3)
        assert resumed.code == 0, resumed.output
        assert found == expected, number


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    stopped, _ = fit(tmp_path / "run", every=5, fault="SIGTERM", at=17)
    assert stopped.code == 75, stopped.output
    resumed, found = fit(tmp_path / "run", every=5, ranks=1, launcher="")
    assert resumed.code == 0, resumed.output
    assert found is not None
