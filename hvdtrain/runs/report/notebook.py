"""``hvdtrain.report``: the page of some runs in a cell of a notebook."""

from html import escape
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.runs.report import page
from hvdtrain.runs.report.drawing import require_bokeh
from hvdtrain.runs.run_record import read_run
from hvdtrain.system.atomic_files import write_text

_HEIGHT_PIXELS = 900


class Report:
    """A page. A notebook shows it as the value of a cell."""

    def __init__(self, html: str):
        self.html = html
        """The page, which needs no network."""

    def save(self, path: str | Path) -> None:
        """Writes the page to a file; raises OSError if it cannot be written."""
        write_text(Path(path), self.html)

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_HEIGHT_PIXELS}px; border: 0"
        return f'<iframe title="Report" style="{style}" srcdoc="{escape(self.html)}"></iframe>'


def report(*runs: str | Path) -> Report:
    """The figures of runs, as ``hvdtrain report`` draws them: losses, times of ranks, members, checkpoints.

    Args:
        runs: run directories or their URLs, complete or not. Several are drawn on top of each other, with a table of
            the options that differ between them.

    Raises:
        UsageError: no run is named, or Bokeh is not installed (``pip install hvdtrain[report]``).
        DataError: there is no run.
    """
    if not runs:
        raise UsageError("report needs a run. Received: none. For example: hvdtrain.report('runs/digits')")
    require_bokeh()
    return Report(page.html([read_run(each) for each in runs]))
