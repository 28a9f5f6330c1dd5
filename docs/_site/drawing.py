"""The vocabulary of the pictures in docs/images: boxes, arrows, text and timelines of ranks, as SVG.

Pictures are 400 px wide with type of at least 14 px, so that they can be read on a phone, and have their own
background, so that they can be read on dark pages.
"""

from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

WIDTH = 400
MARGIN = 16
_LINE = 1.3
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Color(NamedTuple):
    """A fill, and the color of what is drawn on it or in its place."""

    fill: str
    line: str


INK = "#1b2330"
MUTED = "#4d5870"
COMPUTE = Color("#dbe2fb", "#3949ab")
COMMUNICATE = Color("#fde3c3", "#b45309")
STORE = Color("#d3efdd", "#1f7a46")
LOST = Color("#fbd9d6", "#b3261e")
IDLE = Color("#e9edf4", "#8490a6")
_PAPER = Color("#f7f9fc", "#d3dae6")


class Drawing:
    """A picture that is drawn from top to bottom.

    Args:
        title: its heading, and its name for screen readers.
        description: what it shows, for those who do not see it.
    """

    def __init__(self, title: str, description: str):
        self._title, self._description = title, description
        self._elements: list[str] = []
        self.text(MARGIN, 31, title, size=17, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        bold: bool = False,
        color: str = INK,
        anchor: Literal["start", "middle", "end"] = "start",
    ) -> None:
        """Lines of text; ``y`` is the baseline of the first."""
        weight = ' font-weight="700"' if bold else ""
        for i, line in enumerate(text.split("\n")):
            self._elements.append(
                f'<text x="{x:g}" y="{y + i * size * _LINE:g}" font-size="{size}" fill="{color}"'
                f' text-anchor="{anchor}"{weight}>{escape(line)}</text>'
            )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", color: Color = COMPUTE, *, size: int = 14
    ) -> None:
        """A box with lines of text in its middle."""
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color.fill}"'
            f' stroke="{color.line}"/>'
        )
        if text:
            lines = text.count("\n")
            baseline = y + height / 2 + size * (0.36 - lines * _LINE / 2)
            self.text(x + width / 2, baseline, text, size=size, anchor="middle")

    def bar(self, x: float, y: float, width: float, height: float, color: Color) -> None:
        """A solid bar of a chart."""
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{color.line}"/>'
        )

    def line(self, *points: tuple[float, float], color: str = MUTED, width: float = 1.5, dashed: bool = False) -> None:
        """A line through points."""
        self._path(_through(points), color, width, ' stroke-dasharray="4 4"' if dashed else "")

    def arrow(self, *points: tuple[float, float], color: str = MUTED) -> None:
        """A line through points with a head at the last."""
        self._path(_through(points), color, 1.5, "")
        (from_x, from_y), (x, y) = points[-2:]
        right, down = (x > from_x) - (x < from_x), (y > from_y) - (y < from_y)
        ends = [
            (x - 7 * right + 4 * down, y - 7 * down + 4 * right),
            (x - 7 * right - 4 * down, y - 7 * down - 4 * right),
        ]
        self._path(_through([ends[0], (x, y), ends[1]]), color, 1.5, "")

    def node(self, x: float, y: float, text: str, color: Color = COMMUNICATE) -> None:
        """A circle with a short text."""
        self._elements.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="17" fill="{color.fill}" stroke="{color.line}" stroke-width="1.5"/>'
        )
        self.text(x, y + 5, text, anchor="middle", bold=True)

    def cross(self, x: float, y: float) -> None:
        """Marks the place where a process is killed."""
        for slope in (1, -1):
            self.line((x - 8, y - 8 * slope), (x + 8, y + 8 * slope), color=LOST.line, width=3.5)

    def row(self, y: float, label: str, spans: Sequence[tuple[float, float, str, Color]], *, left: float = 76) -> None:
        """One rank's time: spans from one place to another, counted from ``left``."""
        self.text(MARGIN, y + 17, label)
        for start, end, text, color in spans:
            self.box(left + start, y, end - start, 24, text, color)

    def key(self, x: float, y: float, text: str, color: Color) -> None:
        """An entry of a legend."""
        self.box(x, y - 11, 14, 14, color=color)
        self.text(x + 20, y, text)

    def svg(self, height: float) -> str:
        """The file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}"'
                f' viewBox="0 0 {WIDTH} {height:g}" role="img" font-family="{_FONT}">',
                f"<title>{escape(self._title)}</title>",
                f"<desc>{escape(self._description)}</desc>",
                f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10" fill="{_PAPER.fill}"'
                f' stroke="{_PAPER.line}"/>',
                *self._elements,
                "</svg>\n",
            ]
        )

    def _path(self, path: str, color: str, width: float, dashes: str) -> None:
        self._elements.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:g}" stroke-linecap="round"{dashes}/>'
        )


def _through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
