"""What was struck in failures.py and elastic_soak.py: adds up results/failures.json, and prints it as a table.

launch/run python benchmarks/failure_results.py
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.system.json_files import read_object

RESULTS = Path(__file__).with_name("results") / "failures.json"


def add(mode: str, failures: Mapping[str, int], seed: int, worst: Mapping[str, float], **counts: int) -> None:
    """Adds what happened in one call to the row of a mode.

    Args:
        failures: how often each kind happened.
        worst: figures of which the largest is kept.
        counts: figures that are added up.
    """
    results = read_object(RESULTS) if RESULTS.exists() else {}
    row = results.setdefault(mode, {"failures": {}, "worst": {}, "seeds": []})
    row["failures"] = dict(sorted((Counter(row["failures"]) + Counter(failures)).items()))
    row["worst"] = {name: max(value, row["worst"].get(name, value)) for name, value in worst.items()}
    row.update({name: row.get(name, 0) + value for name, value in counts.items()})
    row["seeds"].append(seed)
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")


def table() -> str:
    """The failures of each kind in each mode, in Markdown."""
    results = read_object(RESULTS)
    kinds = sorted({kind for row in results.values() for kind in row["failures"]})
    lines = [f"| mode | {' | '.join(kinds)} | all | runs |", "|---" * (len(kinds) + 3) + "|"]
    total, num_runs = Counter[str](), 0
    for mode, row in results.items():
        total += Counter(row["failures"])
        num_runs += row["runs"]
        lines.append(_line(mode, kinds, row["failures"], row["runs"]))
    return "\n".join([*lines, _line("all", kinds, total, num_runs)])


def _line(name: str, kinds: list[str], failures: Mapping[str, int], num_runs: int) -> str:
    counts = [failures.get(kind, 0) for kind in kinds]
    return f"| {name} | {' | '.join(str(each or '') for each in counts)} | {sum(counts)} | {num_runs} |"


if __name__ == "__main__":
    print(table())
