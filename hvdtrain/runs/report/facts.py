"""What is known about runs, for tables: results, events, and what differs between them."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from hvdtrain.runs.run_record import NOT_METRICS, RunRecord, is_finite, number

_RESULTS = {
    "steps": "steps",
    "epochs": "epochs",
    "loss": "training loss, last epoch",
    "wall_seconds": "seconds since the last start, with evaluation and saving",
    "examples_per_second": "samples per second while steps are made, since the last start",
    "skipped_steps": "skipped steps",
    "bad_samples": "unreadable samples",
    "compression_error": "compression error",
    "resumed_from": "last resumed from step",
    "lost_steps": "steps of ranks that were lost",
    "weights_sha256": "SHA-256 of the weights",
}
"""Values of a summary, and what they are called on the page."""


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What differs between runs: options, versions, hosts, files of code, and data; each with all values."""
    options = [{name: value for name, value in run.config.items() if name != "run_dir"} for run in runs]
    rows = by_name([{**its_options, **_made_with(run)} for its_options, run in zip(options, runs, strict=True)])
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def by_name(of_runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Facts of several runs side by side: each name with its value in every run."""
    names = dict.fromkeys(name for each in of_runs for name in each)
    return [(name, [_shown(each.get(name, "")) for each in of_runs]) for name in names]


def facts(run: RunRecord) -> dict[str, Any]:
    """What is known about a run."""
    start = {name: value for name, value in run.last("start").items() if name not in NOT_METRICS}
    end = {label: run.summary[name] for name, label in _RESULTS.items() if run.summary.get(name) is not None}
    evaluation = {f"evaluation: {name}": value for name, value in _items(run.summary.get("eval"))}
    return {"state": "complete" if run.summary else "not complete, or still running", **start, **end, **evaluation}


def made_with(run: RunRecord) -> list[tuple[str, str]]:
    """Versions, hosts, code and data of a run."""
    return [(name, _shown(value)) for name, value in _made_with(run).items()]


def notes(run: RunRecord) -> list[tuple[str, str]]:
    """What was reported during a run: its step, and the text."""
    found = []
    last_s: float | None = None
    for event in run.events:
        step, kind = _shown(event.get("step", "")), event.get("event")
        if kind == "warning":
            found.append((step, _shown(event.get("text", ""))))
        elif kind == "resume":
            found.append((step, _resumed(event, last_s)))
        elif kind == "members":
            found.append((step, _members(event)))
        if kind not in ("start", "resume"):
            last_s = number(event.get("time"))
    return found


def _resumed(event: Mapping[str, Any], last_s: float | None) -> str:
    """Args: last_s: when the last line before the start was written."""
    checkpoint = PurePosixPath(_shown(event.get("checkpoint", "a checkpoint"))).name
    resumed_s = number(event.get("time"))
    after = "" if last_s is None or resumed_s is None else f", {resumed_s - last_s:.0f} s after the last line before"
    return f"resumed from {checkpoint}{after}"


def _members(event: Mapping[str, Any]) -> str:
    now, before, pause = (number(event.get(name)) for name in ("ranks", "ranks_before", "pause_seconds"))
    change = "the ranks changed"
    if now is not None and before is not None and now != before:
        change = f"{_ranks(abs(now - before))} {'lost, or left' if now < before else 'joined'}"
    after = "" if pause is None or not is_finite(pause) else f", after a pause of {pause:.2f} s"
    return f"{change}; {_ranks(now)} from here on{after}"


def _ranks(count: float | None) -> str:
    return "an unknown number of ranks" if count is None else f"{count:g} rank{'s' if count != 1 else ''}"


def _made_with(run: RunRecord) -> dict[str, Any]:
    """Each fact of ``provenance.json`` by a name that says where it belongs: ``versions: keras``."""
    return {f"{group}: {name}": value for group, values in run.provenance.items() for name, value in _items(values)}


def _items(values: object) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, dict) else []


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
