"""What is known about runs, for tables: results, events, and what differs between them."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.runs.run_record import NOT_METRICS, RunRecord, is_finite

_RESULTS = (
    *("loss", "steps", "epochs", "wall_seconds", "examples_per_second", "skipped_steps", "bad_samples"),
    *("compression_error", "resumed_from", "lost_steps", "weights_sha256"),
)


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What differs between runs: options, versions, hosts, files of code, and data; each with all values."""
    options = [{name: value for name, value in run.config.items() if name != "run_dir"} for run in runs]
    found = [{**its_options, **_made_with(run)} for its_options, run in zip(options, runs, strict=True)]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [(name, [_shown(each.get(name)) for each in found]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What is known about a run."""
    start = {name: value for name, value in run.last("start").items() if name not in NOT_METRICS}
    end = {name: run.summary[name] for name in _RESULTS if run.summary.get(name) is not None}
    rows: list[tuple[str, Any]] = [*start.items(), *end.items()]
    skew = run.summary.get("skew")
    if isinstance(skew, dict) and is_finite(skew.get("slowest_share")):
        share = 100 * skew["slowest_share"]
        rank, host = skew.get("slowest_rank"), skew.get("slowest_host")
        rows.append(("slowest rank", f"rank {rank} on host {host}, the last in {share:.0f} % of the steps"))
    state = "complete" if run.summary else "not complete, or still running"
    return [("state", state), *((name, _shown(value)) for name, value in rows)]


def made_with(run: RunRecord) -> list[tuple[str, str]]:
    """Versions, hosts, code and data of a run."""
    return [(name, _shown(value)) for name, value in _made_with(run).items()]


def notes(run: RunRecord) -> list[tuple[str, str]]:
    """What was reported during a run: its step, and the text."""
    found = []
    for event in run.events:
        step, kind = _shown(event.get("step", "")), event.get("event")
        if kind == "warning":
            found.append((step, _shown(event.get("text", ""))))
        elif kind == "resume":
            found.append((step, f"resumed from {_shown(event.get('checkpoint', 'a checkpoint'))}"))
        elif kind == "members":
            pause = event.get("pause_seconds")
            seconds = f", after a pause of {pause:.2f} s" if is_finite(pause) else ""
            found.append((step, f"{_shown(event.get('ranks'))} rank(s) train together from here on{seconds}"))
    return found


def _made_with(run: RunRecord) -> dict[str, Any]:
    """Each fact of ``provenance.json`` by a name that says where it belongs: ``versions: keras``."""
    found = {}
    for group, values in run.provenance.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            found[f"{group}: {name}"] = value
    return found


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
