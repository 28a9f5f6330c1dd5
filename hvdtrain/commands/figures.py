"""Figures that commands draw. matplotlib is optional: hvdtrain does not require it."""

from typing import Any

NO_FIGURE = (
    "{} was not drawn: figures need matplotlib. Install it: HVDTRAIN_EXTRAS=plot launch/run …, or pip install "
    "'hvdtrain[plot]'"
)
"""The message to print, with the path of the figure, where :func:`make_figure` returns None."""


def make_figure(**options: Any) -> Any | None:
    """A ``matplotlib.figure.Figure``; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(**options)
