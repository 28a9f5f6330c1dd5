"""The figures of a report: what each shows of one or several runs, as series of numbers."""

import dataclasses
from collections.abc import Mapping, Sequence

from hvdtrain.runs.report import step_parts
from hvdtrain.runs.run_record import NOT_METRICS, RunRecord, is_finite, number

_MAX_POINTS = 2000
"""The most points of a line: a page stays small, whatever the length of the run."""
_MAX_METRICS = 6
_GAUGES = {
    "examples/s": ("Throughput", "Samples per second over all ranks, while steps are made.", "samples/s"),
    "learning_rate": ("Learning rate", "The learning rate of each step.", "learning rate"),
    "gradient_norm": ("Gradient norm", "The norm of the gradients of all variables.", "norm"),
    "loss_scale": (
        "Loss scale",
        "The factor of float16 losses. It is halved when a gradient overflows, and that step is skipped.",
        "factor",
    ),
    "skipped_steps": ("Skipped steps", "Steps so far that changed no weights, because gradients were not finite.", ""),
    "bad_samples": ("Bad samples", "Samples so far that could not be read and were left out.", "samples"),
    "compression_error": (
        "Compression error",
        "What compression left out of rank 0's gradient, relative to its norm. It is added to the next gradient.",
        "",
    ),
    "effective_batch": ("Effective batch", "Samples in an update, of the ranks that did not miss it.", "samples"),
    "missed_updates": ("Missed updates", "Updates so far that ranks missed; their gradients joined a later one.", ""),
    "gpu_memory_mib": ("GPU memory", "The peak memory of rank 0's process on its GPU.", "MiB"),
    "gpu_utilization": ("GPU utilization", "How much of the time rank 0's GPU was busy, from 0 to 1.", ""),
}
"""Values of log lines that are no metrics: title, what the figure shows, and unit."""
_NOT_DRAWN = ("loss", "s/batch", "smallest_batch", "largest_batch")
"""Values of log lines that other figures show."""
_AXES = {"step": "steps", "samples": "samples", "elapsed_seconds": "seconds of training"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of points; ``number`` chooses its color."""

    label: str
    x: list[float]
    y: list[float]
    number: int
    is_dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure with one horizontal axis."""

    name: str
    title: str
    says: str
    """What it shows, in a sentence."""
    x_label: str
    y_label: str


@dataclasses.dataclass(frozen=True)
class Lines(Figure):
    lines: Sequence[Line]
    is_logarithmic: bool = False
    is_stepped: bool = False
    """Whether these are whole numbers, each of which holds until the next one."""


@dataclasses.dataclass(frozen=True)
class Areas(Figure):
    """Areas on top of each other."""

    x: list[float]
    heights: Mapping[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Cells(Figure):
    """A cell for each rank and some steps, colored by its value."""

    left: list[float]
    right: list[float]
    row: list[int]
    value: list[float]
    ratio: list[float]


@dataclasses.dataclass(frozen=True)
class Bars(Figure):
    """A bar at each x."""

    x: list[float]
    y: list[float]


def figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """All figures that have something to show, in order. Those of ranks and members need a single run."""
    found = [
        *_losses(runs),
        *_metrics(runs),
        *(_values(runs, name, *shown) for name, shown in _GAUGES.items()),
        _scaling(runs),
    ]
    if len(runs) == 1:
        found += [_parts(runs[0]), _ranks(runs[0]), _shares(runs[0]), _members(runs[0]), *_stops(runs[0])]
    return [each for each in found if each is not None]


def _losses(runs: Sequence[RunRecord]) -> list[Figure | None]:
    says = "Training (solid) and evaluation (dashed). Lower is better; a flat curve has stopped improving."
    # With one batch size, the figure over samples is that over steps.
    axes = [axis for axis in _AXES if axis != "samples" or len(_batch_sizes(runs)) > 1]
    return [_lines(runs, axis, "loss", f"loss-{axis}", f"Loss over {_AXES[axis]}", says, "loss") for axis in axes]


def _batch_sizes(runs: Sequence[RunRecord]) -> set[float]:
    """The samples per step of each run, over half of its steps and over all of them."""
    sizes: set[float] = set()
    for run in runs:
        steps, samples = _finite(*run.points("train", "step", "samples"))
        sizes |= {round(samples[i] / steps[i]) for i in {len(steps) // 2, len(steps) - 1} if steps and steps[i] > 0}
    return sizes


def _metrics(runs: Sequence[RunRecord]) -> list[Figure | None]:
    known = dict.fromkeys(
        name
        for run in runs
        for event in ("train", "eval")
        for name, value in run.last(event).items()
        if name not in (*NOT_METRICS, *_GAUGES, *_NOT_DRAWN) and is_finite(value)
    )
    says = "Training (solid) and evaluation (dashed)."
    return [_lines(runs, "step", name, f"metric-{name}", name, says, name) for name in list(known)[:_MAX_METRICS]]


def _lines(
    runs: Sequence[RunRecord], axis: str, value: str, name: str, title: str, says: str, y_label: str
) -> Lines | None:
    lines = []
    for color, run in enumerate(runs):
        for event in ("train", "eval"):
            x, y = _finite(*run.points(event, axis, value))
            if x:
                label = run.name if event == "train" else f"{run.name}, evaluation"
                lines.append(Line(label, *_thinned(x, y), color, is_dashed=event == "eval"))
    if not lines:
        return None
    is_positive = all(each > 0 for line in lines for each in line.y)
    return Lines(name, title, says, _AXES[axis], y_label, lines, is_logarithmic=value == "loss" and is_positive)


def _values(runs: Sequence[RunRecord], value: str, title: str, says: str, y_label: str) -> Lines | None:
    return _lines(runs, "step", value, f"value-{value}", title, says, y_label)


def _scaling(runs: Sequence[RunRecord]) -> Lines | None:
    """Steps on more ranks as ``bench --predict`` predicts them, and as these runs measured them."""
    lines = []
    for color, run in enumerate(runs):
        prediction = run.bench.get("prediction")
        rows = prediction.get("rows") if isinstance(prediction, dict) else None
        found: dict[str, list[tuple[float, float]]] = {}
        for row in filter(_is_predicted, rows if isinstance(rows, list) else ()):
            kind = f"{row.get('mode')}, {row.get('allreduce')} allreduce"
            found.setdefault(kind, []).append((row["ranks"], row["step_ms"]))
        for kind, points in found.items():
            x, y = map(list, zip(*sorted(points), strict=True))
            lines.append(Line(f"{run.name}: predicted, {kind}", x, y, color, is_dashed=True))
    if not lines:
        return None
    for color, run in enumerate(runs, start=len(runs)):
        step_ms = run.summary.get("step_ms")
        ranks = number(run.summary.get("ranks"))
        median_ms = number(step_ms.get("p50")) if isinstance(step_ms, dict) else None
        if ranks is not None and median_ms is not None and is_finite(ranks) and is_finite(median_ms):
            lines.append(Line(f"{run.name}: measured", [ranks], [median_ms], color))
    says = "The time of a step by number of ranks: predicted by bench (dashed), and measured by these runs (points)."
    return Lines("scaling", "Predicted and measured scaling", says, "ranks", "ms", lines)


def _is_predicted(row: object) -> bool:
    return isinstance(row, dict) and is_finite(row.get("ranks")) and is_finite(row.get("step_ms"))


def _parts(run: RunRecord) -> Areas | None:
    found = step_parts.with_gaps([step_parts.parts(line) for line in step_parts.usable(run.rank_times)])
    if not found:
        return None
    x = [(each.first_step + each.step) / 2 for each in found]
    names = ("compute", "input", "waiting", "communication")
    heights = {name: _thinned(x, [getattr(each, name) for each in found])[1] for name in names}
    says = (
        "The time of a step: computing, waiting for input, waiting for the slowest rank, and communication that does "
        "not overlap with computing. Medians of 64 steps; gaps were not recorded."
    )
    return Areas("step-parts", "Where the time goes", says, "steps", "ms", _thinned(x, x)[0], heights)


def _ranks(run: RunRecord) -> Cells | None:
    lines = [line for line in step_parts.usable(run.rank_times) if line["ranks"] > 1]
    if not lines:
        return None
    every = -(-len(lines) * min(64, len(step_parts.ranks(lines[0]))) // (4 * _MAX_POINTS))
    cells = [cell for line in lines[::every] for cell in step_parts.ranks(line)]
    says = (
        "The time until a rank has computed its gradients, for each 64 steps, compared with the median over ranks. The "
        "other ranks wait for the darkest cell of a column. White: not recorded."
    )
    straggler = step_parts.straggler(lines)
    if straggler is not None:
        says += (
            f" Rank {straggler.rank} is the slowest in {100 * straggler.share:.0f} % of the columns, by a factor of "
            f"{straggler.ratio:.1f}, from step {straggler.first_step} on."
        )
    if any("slowest" in line for line in lines):
        says += " Of more than 64 ranks, the ten slowest are shown."
    return Cells(
        "ranks",
        "Ranks",
        says,
        "steps",
        "rank",
        [each.first_step for each in cells],
        [each.step + 1 for each in cells],
        [each.rank for each in cells],
        [each.ready_ms for each in cells],
        [each.ratio for each in cells],
    )


def _shares(run: RunRecord) -> Lines | None:
    lines = [line for line in step_parts.usable(run.rank_times) if isinstance(line.get("batch_sizes"), list)]
    lines = [line for line in lines if all(map(is_finite, line["batch_sizes"]))]
    if not lines:
        return None
    num_ranks = max(len(line["batch_sizes"]) for line in lines)
    drawn = []
    for rank in range(num_ranks):
        points = [(line["first_step"], line["batch_sizes"][rank]) for line in lines if rank < len(line["batch_sizes"])]
        drawn.append(Line(f"rank {rank}", *_thinned(*map(list, zip(*points, strict=True))), rank))
    says = "Samples of each rank in a micro-batch. Slower ranks get fewer."
    return Lines("shares", "Shares of the batch", says, "steps", "samples", drawn, is_stepped=True)


def _members(run: RunRecord) -> Lines | None:
    x, y = _finite(*run.points("members", "step", "ranks"))
    if not x:
        return None
    before = number(run.of_kind("members")[0].get("ranks_before"))
    if before is not None and is_finite(before):
        x, y = [0, *x], [before, *y]
    last = number(run.events[-1].get("step"))
    if last is not None and is_finite(last):
        x, y = [*x, last], [*y, y[-1]]
    says = "The ranks that train together. The number falls when a rank is lost or leaves, and rises when one joins."
    return Lines("members", "Number of ranks", says, "steps", "ranks", [Line("ranks", x, y, 0)], is_stepped=True)


def _stops(run: RunRecord) -> list[Figure | None]:
    """What training stood still for."""
    found: list[Figure | None] = []
    for event, value, title, says in (
        (
            "members",
            "pause_seconds",
            "Pauses when ranks change",
            "How long training paused when ranks left or joined.",
        ),
        ("checkpoint", "blocked_seconds", "Checkpoints", "How long training paused for each checkpoint."),
    ):
        x, y = _finite(*run.points(event, "step", value))
        if x:
            found.append(Bars(f"stops-{event}", title, says, "steps", "s", *_thinned(x, y)))
    return found


def _finite(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    pairs = [pair for pair in zip(x, y, strict=True) if all(map(is_finite, pair))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _thinned(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """At most 2,000 points, the last one among them."""
    every = -(-len(x) // _MAX_POINTS) or 1
    return x[::-every][::-1], y[::-every][::-1]
