"""The launcher of the tests: they rely on it to fail if a job hangs, fails or does nothing."""

import sys
from pathlib import Path

import pytest
from launcher import Finished, executed_tests, run_cases, run_job

pytestmark = pytest.mark.slow


def test_a_job_that_hangs_fails_or_executes_no_test_fails_the_test(tmp_path):
    with pytest.raises(AssertionError, match="did not end within"):
        run_job([sys.executable, "-c", "import time; time.sleep(60)"], ranks=2, timeout_s=3)
    with pytest.raises(AssertionError, match="exit code"):
        run_cases("that_do_not_exist", ranks=1, minimum=0, folder=tmp_path, timeout_s=60)
    assert executed_tests(tmp_path / "none.xml") == 0
    skipped = Path(tmp_path / "skipped.xml")
    skipped.write_text('<testsuites><testsuite tests="5" failures="1" errors="0" skipped="3"/></testsuites>')
    assert executed_tests(skipped) == 1


def test_a_message_is_found_within_a_line_of_horovod():
    output = "[0]<stderr>:[hvdtrain: lost rank 1\n[0]<stderr>:2026-01-01 00:00:00: E operations.cc:697] [0]: failed\n"
    assert Finished(1, output).only_message == "hvdtrain: lost rank 1"
    for other in ("", output * 2):
        with pytest.raises(AssertionError):
            _ = Finished(1, other).only_message
