"""What benchmarks read from the folder of a run."""

import json
from pathlib import Path
from typing import Any


def summary_and_curve(run_dir: Path) -> tuple[dict[str, Any], list[list[float]]]:
    """The summary of a run, and its evaluations: seconds since the first step, loss."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "eval"]
    summary = json.loads((run_dir / "summary.json").read_text())
    began_s = evaluations[-1]["time"] - summary["wall_seconds"]
    return summary, [[event["time"] - began_s, event["loss"]] for event in evaluations]
