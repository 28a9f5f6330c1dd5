"""Writes docs/conformance.md from the results of two jobs, of the programs and of the broken programs:

python tests/conformance/table.py programs/rank0.xml broken_programs/rank0.xml
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
WAYS = {"fit": "`model.fit`", "trainer": "`Trainer`", "task": "`--task`"}
"""The ways to train a program, and the headings of their columns."""
RESULT, FOUND = "result", "found"
"""The properties of test cases that hold the result of a program, and what was found when it was broken."""
NOT_BROKEN = "–"

_HEAD = """# Conformance: programs compared with one process

Programs in the style of published Keras examples (`tests/conformance/programs/`). Each is trained for 6 steps in one
process, and on 2 ranks by `model.fit` with `DistributedOptimizer`, by `Trainer`, and by `python -m hvdtrain --task`.

"equal": the weights are those of one process, on all ranks, and `Trainer` and `--task` log the same loss and metrics.
The number is the largest difference of a weight, divided by the largest weight of its variable or by 1, whichever is
greater; at most 1e-6 is allowed. "refused": hvdtrain raises an error that begins with these words.

"if broken, found by": each program is also trained by `model.fit` on 2 ranks while one thing in it or in hvdtrain is
wrong. Before the colon is what is wrong, after it what the error names; it ends training on all ranks, after the first
step at the latest.

Each program is also trained by `Trainer` with each of ten options (`--balance`, `--quorum`, `--shard-optimizer`, …):
the weights are those of one process, or the option is refused.

Models with embeddings under Adam or RMSprop are compared with one process that sums the entries of a row, see
[numerics.md](numerics.md#embeddings).

`launch/run pytest -m long tests/conformance` repeats the comparison; `tests/conformance/table.py` writes this page from
its results.
"""


def read_results(junit: Path) -> dict[str, dict[str, str]]:
    """The result of each program in each way, from the JUnit file of a rank."""
    results: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        for each in case.iter("property"):
            if each.get("name") == RESULT:
                program, _, way = case.get("name", "").partition("[")[2].rstrip("]").rpartition("-")
                results.setdefault(program, {})[way] = each.get("value", "")
    return results


def read_found(junit: Path) -> dict[str, str]:
    """How each program was broken and what was reported, from the JUnit file of a rank."""
    return {
        case.get("name", "").partition("[")[2].rstrip("]"): each.get("value", "")
        for case in ElementTree.parse(junit).getroot().iter("testcase")
        for each in case.iter("property")
        if each.get("name") == FOUND
    }


def render(rows: list[tuple[str, str]], results: dict[str, dict[str, str]], found: dict[str, str]) -> str:
    """The document.

    Args:
        rows: name and description of each program.
        results: those of each program in each way.
        found: what was reported of each program that was broken.
    """
    lines = [f"| program | {' | '.join(WAYS.values())} | if broken, found by |", f"|{'---|' * (2 + len(WAYS))}"]
    for name, description in rows:
        cells = [*(results[name][way] for way in WAYS), found.get(name, NOT_BROKEN)]
        lines.append(f"| `{name}`: {description} | {' | '.join(cells)} |")
    return "\n".join([_HEAD, *lines, ""])


def descriptions() -> list[tuple[str, str]]:
    """Name and description of each program."""
    from programs import PROGRAMS

    return [(each.__name__, each.__doc__.splitlines()[0].rstrip(".")) for each in PROGRAMS]


if __name__ == "__main__":
    programs, broken_programs = map(Path, sys.argv[1:])
    DOCUMENT.write_text(render(descriptions(), read_results(programs), read_found(broken_programs)))
