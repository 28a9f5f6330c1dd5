"""The page of a report: one HTML file that needs no network."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.runs.report.drawing import Columns, columns_of, draw_all
from hvdtrain.runs.report.facts import by_name, differences, facts, made_with, notes
from hvdtrain.runs.report.figures import Figure, figures
from hvdtrain.runs.run_record import RunRecord

_HERE = Path(__file__).parent


def html(runs: Sequence[RunRecord], *, is_live: bool = False) -> str:
    """The page of some runs.

    Args:
        is_live: the page asks its server for new values.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    drawn = figures(runs)
    script, places = components(draw_all(drawn)) if drawn else ("", {})
    title = ", ".join(run.name for run in runs)
    links = " ".join(f'<a href="#{escape(_anchor(each))}">{escape(each.title)}</a>' for each in drawn)
    sections = "\n".join(_section(each, places[each.name]) for each in drawn)
    live = f"<script>\n{(_HERE / 'live.js').read_text()}</script>" if is_live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:; connect-src 'self'">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text()}</style>
{Resources(mode="inline", components=["bokeh"]).render()}
</head>
<body data-layout="{escape(layout(drawn))}">
<header><h1>{escape(title)}</h1><nav aria-label="Figures">{links}</nav></header>
<main>
<div id="tables">{tables(runs)}</div>
{sections}
</main>
{script}
{live}
</body>
</html>
"""


def layout(drawn: Iterable[Figure]) -> str:
    """What a page must have to be filled with new values without being loaded again."""
    return json.dumps([name for each in drawn for name in columns_of(each)])


def values(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """What changes on a page while a run goes on."""
    drawn = figures(runs)
    sources: dict[str, Columns] = {name: columns for each in drawn for name, columns in columns_of(each).items()}
    return {"layout": layout(drawn), "sources": sources, "tables": tables(runs)}


def tables(runs: Sequence[RunRecord]) -> str:
    """What is known about the runs, how they differ, and what happened in them."""
    parts = []
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    if len(runs) > 1 and (different := differences(runs)):
        parts.append(_table("What differs", head, [[name, *shown] for name, shown in different]))
    title = "The run" if len(runs) == 1 else "The runs"
    parts.append(_table(title, head, [[name, *shown] for name, shown in by_name(list(map(facts, runs)))]))
    for run in runs:
        if rows := notes(run):
            of_run = "" if len(runs) == 1 else f" in {run.name}"
            parts.append(_table(f"What happened{of_run}", ["step", "event"], rows))
    if len(runs) == 1:
        options = [(name, str(value)) for name, value in runs[0].config.items()]
        for summary, rows in (("Options", options), ("Versions, hosts, code and data", made_with(runs[0]))):
            if rows:
                parts.append(f"<details><summary>{summary}</summary>{_table('', [], rows)}</details>")
    return "".join(parts)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    caption = f"<h2>{escape(title)}</h2>" if title else ""
    first = f"<tr>{''.join(f'<th scope=col>{escape(each)}</th>' for each in head)}</tr>" if head else ""
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th>{''.join(f'<td>{escape(each)}</td>' for each in rest)}</tr>"
        for name, *rest in rows
    )
    return f'{caption}<div class="wide"><table>{first}{body}</table></div>'


def _section(figure: Figure, place: str) -> str:
    return (
        f'<section id="{escape(_anchor(figure))}"><h2>{escape(figure.title)}</h2><p>{escape(figure.says)}</p>'
        f"{place}</section>"
    )


def _anchor(figure: Figure) -> str:
    return "figure-" + "".join(each if each.isalnum() else "-" for each in figure.name)
