"""MkDocs hook: the reports of the runs in docs/runs, as pages of the site."""

import dataclasses
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hvdtrain.runs.report import page
from hvdtrain.runs.run_record import RunRecord, read_run

RUNS = Path(__file__).resolve().parents[1] / "runs"
REPORTS = {
    "slow-rank": ("slow-rank",),
    "lost-rank": ("lost-rank",),
    "comparison": ("slow-rank", "slow-rank-balanced"),
}
"""The runs of each report."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reports."""
    for name, runs in REPORTS.items():
        files.append(File.generated(config, f"gallery/{name}.html", content=page.html(list(map(record, runs)))))
    return files


def record(name: str) -> RunRecord:
    """A run of the gallery, under its short name."""
    return dataclasses.replace(read_run(RUNS / name), name=name)
