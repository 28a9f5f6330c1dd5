"""Whether every test ran: python tests/complete_run.py COLLECTED JUNIT_XML…

COLLECTED is the output of ``pytest --collect-only -q``; each JUnit file is of a run that selected some of these tests.
Fails if a test is in none of the files or in several, was skipped without a reason, or if a run executed no test.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

# What pytest writes for a skip without a reason.
NO_REASON = {"", "Skipped", "unconditional skip"}


class IncompleteError(Exception):
    """A test did not run, and no reason is stated."""


def collected_tests(output: str) -> set[tuple[str, str]]:
    """The class name and name that a JUnit file has for each test."""
    found = set()
    for line in filter(re.compile(r"\S+\.py::").match, output.splitlines()):
        address, bracket, parameters = line.partition("[")
        path, *classes, name = address.split("::")
        found.add((".".join([path.removesuffix(".py").replace("/", "."), *classes]), name + bracket + parameters))
    return found


def junit_tests(path: Path) -> dict[tuple[str, str], str | None]:
    """The tests in a JUnit file, to why they were skipped or expected to fail; None: they ran."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        found[case.get("classname"), case.get("name")] = None if skipped is None else skipped.get("message", "").strip()
    return found


def require_complete(collected: set[tuple[str, str]], runs: dict[str, dict[tuple[str, str], str | None]]) -> str:
    """How many tests ran, and how many were skipped for which reason."""
    if not collected:
        raise IncompleteError("no test was collected: is COLLECTED the output of pytest --collect-only -q?")
    problems = [f"no test ran: {run}" for run, tests in runs.items() if None not in tests.values()]
    times = Counter(test for tests in runs.values() for test in tests)
    outcomes = {test: reason for tests in runs.values() for test, reason in tests.items()}
    for test in sorted(collected | set(outcomes)):
        if test not in outcomes:
            problems.append(f"did not run: {'::'.join(test)}")
        elif test not in collected:
            problems.append(f"ran but was not collected: {'::'.join(test)}")
        elif times[test] > 1:
            problems.append(f"is in {times[test]} runs: {'::'.join(test)}")
        elif outcomes[test] in NO_REASON:
            problems.append(f"skipped without a reason: {'::'.join(test)}")
    if problems:
        raise IncompleteError("\n".join(problems))
    skipped = Counter(reason for reason in outcomes.values() if reason is not None)
    ran = len(outcomes) - skipped.total()
    return "\n".join(
        [f"{ran} tests ran, {skipped.total()} skipped"]
        + [f"{count:>6} skipped: {reason}" for reason, count in skipped.most_common()]
    )


def main(collected: str, *junit_xml: str) -> None:
    runs = {path: junit_tests(Path(path)) for path in junit_xml}
    try:
        print(require_complete(collected_tests(Path(collected).read_text()), runs))
    except IncompleteError as incomplete:
        sys.exit(str(incomplete))


if __name__ == "__main__":
    main(*sys.argv[1:])
