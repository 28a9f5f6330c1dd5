"""The check of .ci/run that every test ran."""

import subprocess
import sys

import complete_run
import pytest

COLLECTED = {("tests.a", "test_1"), ("tests.a", "test_2[x::y]"), ("tests.b", "test_1")}
RUNS = {
    "quick.xml": {("tests.a", "test_1"): None, ("tests.a", "test_2[x::y]"): "needs a GPU"},
    "slow.xml": {("tests.b", "test_1"): None},
}


def test_runs_that_together_are_complete():
    summary = complete_run.require_complete(COLLECTED, RUNS)
    assert summary.splitlines() == ["2 tests ran, 1 skipped", "     1 skipped: needs a GPU"]


def changed(run: str, tests: dict) -> dict:
    return RUNS | {run: RUNS[run] | tests}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"quick.xml": RUNS["quick.xml"]}, r"did not run: tests\.b::test_1"),
        (changed("quick.xml", {("tests.a", "test_2[x::y]"): ""}), r"without a reason: tests\.a::test_2\[x::y\]"),
        (changed("slow.xml", {("tests.b", "test_1"): "needs a GPU"}), r"no test ran: slow\.xml"),
        (RUNS | {"slow.xml": {}}, r"no test ran: slow\.xml"),
        (changed("slow.xml", {("tests.a", "test_1"): None}), r"is in 2 runs: tests\.a::test_1"),
        (changed("slow.xml", {("tests.c", "test_1"): None}), r"not collected: tests\.c::test_1"),
    ],
)
def test_an_incomplete_run_is_reported(runs, message):
    with pytest.raises(complete_run.IncompleteError, match=message):
        complete_run.require_complete(COLLECTED, runs)


def test_nothing_collected_is_reported():
    with pytest.raises(complete_run.IncompleteError, match="no test was collected"):
        complete_run.require_complete(set(), RUNS)


TESTS = r"""
import pytest

class TestGroup:
    def test_in_class(self):
        pass

@pytest.mark.parametrize("value", ["a.py::b", "line\nend\n", "ü [x] <&> \"", "\x1b\x00"])
def test_names(value):
    pass

def test_skipped():
    pytest.skip("no network")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    raise AssertionError

@pytest.mark.skip
def test_without_reason():
    pass

def test_skips_without_reason():
    pytest.skip("")
"""


def test_output_of_pytest(tmp_path):
    """All kinds of names and outcomes that pytest writes."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "test_it.py").write_text(TESTS)

    def run_pytest(selected: str, *flags: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", selected, *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def check(*junit_xml: str) -> subprocess.CompletedProcess:
        command = [sys.executable, complete_run.__file__, "collected", *junit_xml]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "collected").write_text(run_pytest("not without", "--collect-only", "-q"))
    run_pytest("names", "--junitxml=1.xml")
    run_pytest("not names and not without", "--junitxml=2.xml")
    result = check("1.xml", "2.xml")
    assert (result.returncode, result.stderr) == (0, "")
    first, *reasons = result.stdout.splitlines()
    assert first == "5 tests ran, 2 skipped"
    assert sorted(reasons) == ["     1 skipped: known", "     1 skipped: no network"]

    result = check("1.xml")
    assert result.returncode == 1
    assert "did not run: some.test_it.TestGroup::test_in_class" in result.stderr

    (tmp_path / "collected").write_text(run_pytest("test_", "--collect-only", "-q"))
    run_pytest("not names", "--junitxml=2.xml")
    result = check("1.xml", "2.xml")
    assert result.returncode == 1
    assert sorted(result.stderr.splitlines()) == [
        "skipped without a reason: some.test_it::test_skips_without_reason",
        "skipped without a reason: some.test_it::test_without_reason",
    ]
