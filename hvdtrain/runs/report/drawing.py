"""Draws the figures of a report with Bokeh, each from named columns that a live page replaces."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.runs.report.figures import Areas, Bars, Cells, Figure, Lines

Columns = dict[str, list[Any]]

_HEIGHT = 280
_GREY = "#808080"
"""Readable on a light and on a dark page."""
_COLORS = ("#4c8bf5", "#e8710a", "#34a853", "#a142f4", "#d93025", "#12a4af", "#b06000", "#e52592", "#7f868d", "#9aa000")
_PART_COLORS = {"compute": "#4c8bf5", "input": "#e8710a", "waiting": "#d93025", "communication": "#34a853"}


def require_bokeh() -> None:
    """Raises UsageError if Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "reports need Bokeh. Received: a Python without it. Install it: HVDTRAIN_EXTRAS=report launch/run …, or "
            "pip install 'hvdtrain[report]'"
        ) from error


def columns_of(figure: Figure) -> dict[str, Columns]:
    """What a figure draws, by the names of Bokeh's sources."""
    if isinstance(figure, Lines):
        found: list[Columns] = [{"x": line.x, "y": line.y} for line in figure.lines]
    elif isinstance(figure, Areas):
        found = [{"x": figure.x, **figure.heights}]
    elif isinstance(figure, Cells):
        edges = {"top": [row + 0.5 for row in figure.row], "bottom": [row - 0.5 for row in figure.row]}
        columns = ("left", "right", "row", "value", "ratio")
        found = [{**{name: getattr(figure, name) for name in columns}, **edges}]
    else:
        assert isinstance(figure, Bars)
        found = [{"x": figure.x, "y": figure.y}]
    return {f"{figure.name} {i}": each for i, each in enumerate(found)}


def draw_all(figures: Sequence[Figure]) -> dict[str, Any]:
    """Bokeh figures by name. Those with the same horizontal axis show the same part of it, also when one is moved."""
    from bokeh.models import DataRange1d

    ranges = {each.x_label: DataRange1d() for each in figures}
    return {each.name: _draw(each, ranges[each.x_label]) for each in figures}


def _draw(figure: Figure, x_range: Any) -> Any:
    from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
    from bokeh.plotting import figure as make_figure

    sources = [ColumnDataSource(columns, name=name) for name, columns in columns_of(figure).items()]
    is_logarithmic = isinstance(figure, Lines) and figure.is_logarithmic
    made = make_figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        x_range=x_range,
        x_axis_label=figure.x_label,
        y_axis_label=figure.y_label,
        y_axis_type="log" if is_logarithmic else "auto",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        toolbar_location="right",
        active_scroll=None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
    )
    if isinstance(figure, Lines) and figure.is_stepped:
        made.y_range.start = 0
        made.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    elif isinstance(figure, Lines) and (found := {y for line in figure.lines for y in line.y}) and len(found) == 1:
        made.y_range.default_span = abs(found.pop()) or 1  # A constant: without it, the axis is that of 0 to 1.
    elif isinstance(figure, Areas | Bars):
        made.y_range.start = 0
    made.toolbar.logo = None
    made.toolbar.autohide = True
    if isinstance(figure, Lines):
        _draw_lines(made, figure, sources)
        hover = [(figure.x_label, "@x"), (figure.y_label, "@y")]
    elif isinstance(figure, Areas):
        names = list(figure.heights)
        colors = [_PART_COLORS.get(name, _GREY) for name in names]
        made.varea_stack(names, x="x", source=sources[0], color=colors, legend_label=names, fill_alpha=0.8)
        hover = []
    elif isinstance(figure, Cells):
        _draw_cells(made, sources[0])
        hover = [("rank", "@row"), ("steps", "@left to @right"), ("ms", "@value"), ("times the median", "@ratio{0.00}")]
    else:
        made.vbar(x="x", top="y", width=1, source=sources[0], color=_COLORS[0], line_color=_COLORS[0], line_width=2)
        hover = [(figure.x_label, "@x"), (figure.y_label, "@y")]
    if hover:
        made.add_tools(HoverTool(tooltips=hover))
    _make_readable(made)
    return made


def _draw_lines(made: Any, figure: Lines, sources: list[Any]) -> None:
    for line, source in zip(figure.lines, sources, strict=True):
        # Equal lines are seen beneath each other.
        width = 2 + 2 * (len({each.number for each in figure.lines}) - 1 - line.number) if not figure.is_stepped else 2
        style = {"color": _COLORS[line.number % len(_COLORS)], "line_width": max(2, width)}
        if len(figure.lines) > 1:
            style["legend_label"] = line.label
        if figure.is_stepped:
            made.step("x", "y", source=source, mode="after", **style)
        else:
            made.line("x", "y", source=source, line_dash="dashed" if line.is_dashed else "solid", **style)
        if len(line.x) <= 50:
            made.scatter("x", "y", source=source, size=5, **style)


def _draw_cells(made: Any, source: Any) -> None:
    from bokeh.models import BasicTicker, ColorBar
    from bokeh.transform import linear_cmap

    palette = [f"#{255 - i:02x}{255 - i:02x}{255 - i // 3:02x}" for i in range(40, 240, 2)]
    mapper = linear_cmap("ratio", palette, low=0.8, high=2.0)
    made.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        source=source,
        fill_color=mapper,
        line_color=None,
    )
    made.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    bar = ColorBar(color_mapper=mapper["transform"], title="time / median", width=10, background_fill_alpha=0)
    bar.major_label_overrides = {2: "2 or more"}
    bar.title_text_color = bar.major_label_text_color = _GREY
    made.add_layout(bar, "right")


def _make_readable(made: Any) -> None:
    from bokeh.models import BasicTickFormatter

    for axis in made.axis:
        if type(axis.formatter) is BasicTickFormatter:
            axis.formatter.power_limit_low, axis.formatter.power_limit_high = -6, 9
        axis.axis_label_text_color = axis.major_label_text_color = axis.axis_line_color = _GREY
        axis.major_tick_line_color = axis.minor_tick_line_color = _GREY
        axis.axis_label_text_font_style = "normal"
    made.grid.grid_line_color = _GREY
    made.grid.grid_line_alpha = 0.25
    for legend in list(made.legend):
        # Beside the lines, which would hide it.
        made.add_layout(legend, "above")
        legend.ncols = 2
        legend.label_text_color = _GREY
        legend.background_fill_alpha = legend.border_line_alpha = 0
        legend.click_policy = "hide"
        legend.label_text_font_size = "11px"
