"""Draws the diagrams and charts of the pages: launch/run python docs/_site/diagrams.py

Diagrams show how something works, and are not to scale. Charts show numbers, of benchmarks/results and
docs/results.md.
"""

import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from drawing import COMMUNICATE, COMPUTE, IDLE, INK, LOST, MARGIN, MUTED, STORE, WIDTH, Color, Drawing

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images" / "diagrams"
sys.path.append(str(ROOT / "benchmarks"))

from samples import BATCH_SIZES  # noqa: E402

RIGHT = WIDTH - MARGIN


def sync_step() -> str:
    """A step in sync mode, for docs/glossary.md."""
    drawing = Drawing(
        "One step in sync mode",
        "A global batch of 96 samples is divided among three ranks. Each computes the gradients of its 32 samples. "
        "A ring allreduce gives every rank their mean over 96 samples, so all make the same update and stay equal.",
    )
    width, gap = 108, 22
    lefts = [MARGIN + i * (width + gap) for i in range(3)]
    centers = [left + width / 2 for left in lefts]
    drawing.box(MARGIN, 48, RIGHT - MARGIN, 32, "global batch: 96 samples", IDLE)
    for rank, (left, center) in enumerate(zip(lefts, centers, strict=True)):
        drawing.arrow((center, 80), (center, 106))
        drawing.box(left, 108, width, 46, f"rank {rank}\n32 samples", IDLE)
        drawing.box(left, 154, width, 46, "forward,\nbackward")
        drawing.arrow((center, 200), (center, 224))
        drawing.node(center, 243, f"g{rank}")
        drawing.arrow((center, 260), (center, 334))
        drawing.box(left, 336, width, 30, "same update")
        drawing.box(left, 366, width, 30, f"replica {rank}", STORE)
    for one, other in itertools.pairwise(centers):
        drawing.arrow((one + 18, 243), (other - 19, 243), color=COMMUNICATE.line)
    first, last = centers[0], centers[-1]
    drawing.arrow(
        (last + 18, 243), (last + 40, 243), (last + 40, 276), (first - 40, 276), (first - 40, 243), (first - 19, 243),
        color=COMMUNICATE.line,
    )  # fmt: skip
    drawing.box(MARGIN, 290, RIGHT - MARGIN, 30, "ring allreduce: mean over 96 samples", COMMUNICATE)
    for left in lefts[1:]:
        drawing.text(left - gap / 2, 387, "=", size=18, bold=True, anchor="middle")
    drawing.arrow((centers[0], 396), (centers[0], 420))
    drawing.text(MARGIN, 438, "rank 0 writes checkpoints, logs, the model")
    return drawing.svg(454)


def local_sgd() -> str:
    """Rounds of local SGD, for docs/local-sgd.md."""
    drawing = Drawing(
        "Local SGD averages less often",
        "Timelines of two ranks and eight steps. In sync mode, communication follows every step. With local SGD and "
        "H = 4, it follows every fourth step. With --overlap, ranks make further steps while the "
        "average is computed in the background.",
    )
    step, interval = 25, 4

    def ranks(y: float, spans: Sequence[tuple[float, float, str, Color]]) -> None:
        for rank in range(2):
            drawing.row(y + 30 * rank, f"rank {rank}", spans)

    drawing.text(MARGIN, 66, "sync mode: gradients, at every step", bold=True)
    spans = [(38 * i, 38 * i + step, "", COMPUTE) for i in range(8)]
    ranks(78, spans + [(38 * i + step, 38 * (i + 1), "", COMMUNICATE) for i in range(8)])

    drawing.text(MARGIN, 166, "local SGD, H = 4: parameters, every round", bold=True)
    long = interval * step
    spans = [(128 * i + step * j, 128 * i + step * (j + 1), "", COMPUTE) for i in range(2) for j in range(interval)]
    ranks(178, spans + [(128 * i + long, 128 * (i + 1), "", COMMUNICATE) for i in range(2)])

    drawing.text(MARGIN, 266, "--overlap: in the background", bold=True)
    ranks(278, [(step * i, step * (i + 1), "", COMPUTE) for i in range(2 * interval)])
    for end in (long, 2 * long):
        drawing.box(76 + end, 338, 28, 12, "", COMMUNICATE)
    drawing.text(MARGIN, 350, "average")
    drawing.key(MARGIN, 382, "a step on own samples", COMPUTE)
    drawing.key(226, 382, "communication", COMMUNICATE)
    drawing.text(MARGIN, 408, "Steps made during an average are kept.", color=MUTED)
    return drawing.svg(424)


def quorum() -> str:
    """Updates with backup workers, for docs/stragglers.md."""
    drawing = Drawing(
        "A delayed rank, with --quorum 2",
        "Timelines of three ranks and four updates. Rank 2 is delayed in its second micro-batch, c2. Update 2 is made "
        "with the micro-batches of ranks 0 and 1, after a grace period, and so is update 3. Rank 2 drops the late "
        "micro-batch, makes updates 2 and 3, computes c2 again and contributes it to update 4.",
    )
    left, updates = 76, (68, 148, 216, 296)
    for number, at in enumerate(updates, 1):
        drawing.line((left + at, 76), (left + at, 184), color=COMMUNICATE.line, width=2.5)
        drawing.text(left + at, 68, str(number), anchor="middle", bold=True, color=COMMUNICATE.line)
    for rank, letter in enumerate("ab"):
        ends = [(0, 64), (68, 132), (148, 212), (216, 280)]
        spans = [(start, end, f"{letter}{i}", COMPUTE) for i, (start, end) in enumerate(ends, 1)]
        drawing.row(84 + 34 * rank, f"rank {rank}", spans)
    spans = [(0, 64, "c1", COMPUTE), (68, 220, "c2: late, dropped", LOST), (228, 292, "c2", COMPUTE)]
    drawing.row(152, "rank 2", spans)
    drawing.text(MARGIN, 68, "update", color=COMMUNICATE.line, bold=True)
    for y, number, text in (
        (
            216,
            2,
            "is the mean over the samples of ranks 0\nand 1. Before it, they wait for a grace\nperiod, not for rank 2.",
        ),
        (282, 3, "is made by ranks 0 and 1 alone."),
        (312, 4, "Rank 2 has dropped c2, made updates 2\nand 3, and computed c2 again, with the\nnew weights."),
    ):
        drawing.text(MARGIN, y, str(number), bold=True, color=COMMUNICATE.line)
        drawing.text(MARGIN + 20, y, text)
    drawing.text(MARGIN, 386, "No sample is lost, and replicas stay equal.", bold=True)
    return drawing.svg(402)


def elastic() -> str:
    """Two changes of members, for docs/elastic.md."""
    drawing = Drawing(
        "A rank is killed, another joins",
        "Timelines of three ranks in an elastic job with a global batch of 96. Rank 2 is killed. Ranks 0 and 1 repeat "
        f"the interrupted step with 48 samples each; it ends {measured_pause()} s after the kill. A new process starts "
        "while they train, and joins; all have 32 samples again.",
    )
    left, killed, resumed, joined, together = 76, 74, 106, 206, 232
    first = (0, killed, "32", COMPUTE)
    pause = [(killed, resumed, "", COMMUNICATE), (joined, together, "", COMMUNICATE)]
    survivor = [first, pause[0], (resumed, joined, "48", COMPUTE), pause[1], (together, 308, "32", COMPUTE)]
    drawing.row(76, "rank 0", survivor)
    drawing.row(110, "rank 1", survivor)
    drawing.row(144, "rank 2", [first])
    drawing.cross(left + killed, 156)
    drawing.row(178, "new", [(118, joined, "starts", IDLE), pause[1], (together, 308, "32", COMPUTE)])
    for at, text in ((0, "3 ranks"), (resumed, "2 ranks"), (together, "3 ranks")):
        drawing.text(left + at, 66, text, bold=True)
    drawing.line((left + killed, 168), (left + killed, 236), dashed=True)
    lost = f"SIGKILL. The others repeat the interrupted\nstep without rank 2: it ends after {measured_pause()} s."
    new = "A new process imports TensorFlow and\ncompiles its step while the others train,\nthen joins: "
    same = "In the boxes: samples of each rank. The\nglobal batch stays 96, so updates are those\nof one process. "
    drawing.text(MARGIN, 252, lost)
    drawing.text(MARGIN, 306, f"{new}{measured_join()} s between two steps.")
    drawing.text(MARGIN, 378, f"{same}No checkpoint is read.", color=MUTED)
    return drawing.svg(432)


def gradient() -> str:
    """The stages of the gradient pipeline, for docs/architecture.md."""
    drawing = Drawing(
        "The way of a gradient",
        "The stages of the GradientPipeline. On each rank, for each micro-batch: weigh, backward pass, mark, "
        "accumulate. Over all ranks, once a step: reduce. On every rank the same: check, clip, decay, update, average.",
    )
    groups = {
        "each micro-batch, on each rank": [
            ("weigh", "the loss, by number of samples", COMPUTE),
            ("backward", "Keras computes gradients", IDLE),
            ("mark", "a loss that is not finite", COMPUTE),
            ("accumulate", "Keras adds micro-batches", IDLE),
        ],
        "once a step, over all ranks": [("reduce", "allreduce of buckets", COMMUNICATE)],
        "once a step, the same on every rank": [
            ("check", "not finite: skip or stop", STORE),
            ("clip", "clipnorm, clipvalue, …", STORE),
            ("decay", "weight decay", STORE),
            ("update", "variables, optimizer state", STORE),
            ("average", "EMA of the variables", STORE),
        ],
    }
    y = 62
    for heading, stages in groups.items():
        drawing.text(MARGIN, y, heading, color=MUTED)
        y += 10
        for name, text, color in stages:
            drawing.box(MARGIN, y, 106, 30, name, color, size=15)
            drawing.text(MARGIN + 120, y + 20, text)
            if name != "average":
                drawing.arrow((MARGIN + 53, y + 30), (MARGIN + 53, y + 41))
            y += 42
        y += 20
    return drawing.svg(y - 18)


def checkpoint() -> str:
    """How a checkpoint is written, for docs/checkpoints.md."""
    drawing = Drawing(
        "A checkpoint at step 500",
        "All ranks capture their state; the other ranks send theirs to rank 0. Then training continues, while rank 0 "
        "writes in the background: files in a hidden folder, checksums, sync to disk, reading back, rename. A job "
        "that is killed before the rename has the previous checkpoint.",
    )
    half, left, width = 136, MARGIN + 152, RIGHT - MARGIN - 152
    drawing.text(MARGIN, 60, "all ranks", bold=True)
    drawing.text(left, 60, "rank 0, background", bold=True)
    drawing.box(MARGIN, 70, half, 28, "step 500")
    drawing.box(MARGIN, 104, half, 64, "copy weights,\noptimizer,\nrandom state", STORE)
    drawing.box(MARGIN, 174, half, 46, "other ranks send\nown state", COMMUNICATE)
    drawing.box(MARGIN, 226, half, 28, "step 501")
    drawing.box(MARGIN, 260, half, 28, "step 502")
    drawing.text(MARGIN + half / 2, 312, "…", anchor="middle", size=18, bold=True)
    drawing.text(MARGIN + half / 2, 346, "training does\nnot wait", anchor="middle")
    stages = [
        "write the files to\n.step-00000500.writing",
        "write SHA256SUMS",
        "sync to disk",
        "read back, compare",
        "rename to\nstep-00000500",
    ]
    drawing.arrow((MARGIN + half, 197), (MARGIN + half + 8, 197), (MARGIN + half + 8, 94), (left - 2, 94))
    y = 70
    for i, text in enumerate(stages):
        height = 48 if "\n" in text else 34
        drawing.box(left, y, width, height, text, STORE)
        if i < len(stages) - 1:
            drawing.arrow((left + width / 2, y + height), (left + width / 2, y + height + 23))
        y += height + 25
    drawing.text(MARGIN, 410, "Killed before the rename? The previous\ncheckpoint is intact, and is the latest.")
    return drawing.svg(446)


def trainers() -> str:
    """A chart of samples per second, for the first screen."""
    speeds = _speeds(ranks=2, network="cnn")
    drawing = Drawing(
        "Samples per second",
        "; ".join(f"{name}: {quartiles[1]:,.0f}" for name, quartiles in speeds.items())
        + ". A CNN on 2 ranks, batch of 64 on each, on 2 cores; medians with quartiles.",
    )
    scale = 290 / max(high for _, _, high in speeds.values())
    for i, (name, (low, median, high)) in enumerate(speeds.items()):
        y = 58 + 58 * i
        is_ours = name == "hvdtrain"
        drawing.text(MARGIN, y + 10, name, size=15, bold=is_ours)
        drawing.bar(MARGIN, y + 18, median * scale, 22, COMPUTE if is_ours else IDLE)
        drawing.line((MARGIN + low * scale, y + 29), (MARGIN + high * scale, y + 29), color=INK)
        drawing.text(RIGHT, y + 35, f"{median:,.0f}", size=16, bold=True, anchor="end")
    case = "CNN of 1.07 million parameters, 2 ranks on\n2 cores, batch of 64 on each. Median and\n"
    below = 80 + 58 * len(speeds)
    drawing.text(MARGIN, below, f"{case}quartiles; each in its fastest setting.", color=MUTED)
    return drawing.svg(below + 54)


def recovery() -> str:
    """A kill and the next step, for the first screen."""
    pause, horovods = measured_pause(), measured_horovod()
    drawing = Drawing(
        f"A rank is killed: next step after {pause} s",
        f"Timelines of three ranks, to scale. Rank 2 is killed; the other two end their next step after {pause} s. "
        f"Horovod's own elastic mode takes {horovods} s.",
    )
    left, second, killed = 76, 240, 84
    resumed = killed + second * float(pause)
    for rank in range(2):
        spans = [
            (0, killed, "steps", COMPUTE),
            (killed, resumed, f"{pause} s", COMMUNICATE),
            (resumed, 308, "steps", COMPUTE),
        ]
        drawing.row(58 + 34 * rank, f"rank {rank}", spans)
    drawing.row(126, "rank 2", [(0, killed, "steps", COMPUTE)])
    drawing.cross(left + killed, 138)
    drawing.text(left + killed + 18, 143, "SIGKILL", bold=True, color=LOST.line)
    drawing.text(MARGIN, 190, "From the kill to the next step", bold=True)
    scale = 290 / float(horovods)
    for y, name, seconds, color in ((210, "hvdtrain", pause, COMPUTE), (262, "Horovod's elastic mode", horovods, IDLE)):
        drawing.text(MARGIN, y + 8, name, size=15, bold=color is COMPUTE)
        drawing.bar(MARGIN, y + 15, float(seconds) * scale, 22, color)
        drawing.text(RIGHT, y + 32, f"{seconds} s", size=16, bold=True, anchor="end")
    drawing.text(
        MARGIN, 326, "3 ranks on 2 cores, digits; medians of 20\nkills (Horovod: 3, on one host).", color=MUTED
    )
    return drawing.svg(366)


def modes() -> str:
    """Which mode to use, for docs/modes.md."""
    drawing = Drawing(
        "Which mode when",
        "If ranks must be equal after each step: sync mode; with --balance, if the same rank is always slower; with "
        "--quorum, if changing ranks are delayed. If not, local SGD: with --overlap on a slow network; "
        "with --fragments and --sync-dtype int4, if an average takes many steps; --wait-free, if ranks are slow. If "
        "processes die: launch/run --elastic, or --restarts with --quorum.",
    )
    width, gap = 178, 12
    columns = (MARGIN, MARGIN + width + gap)
    drawing.box(MARGIN, 46, RIGHT - MARGIN, 32, "Must ranks be equal after each step?", IDLE)
    choices = (
        (
            "yes",
            COMPUTE,
            ("nothing", "sync mode"),
            ("always the same rank", "--balance"),
            ("now one, now another", "--quorum K"),
        ),
        (
            "no: local SGD",
            STORE,
            ("the network", "--overlap"),
            ("a network far away", "--overlap\n--fragments 4\n--sync-dtype int4"),
            ("slow ranks", "--wait-free"),
        ),
    )
    for left, (answer, color, *rows) in zip(columns, choices, strict=True):
        center = left + width / 2
        drawing.arrow((center, 78), (center, 96))
        drawing.text(center, 113, answer, anchor="middle", bold=True)
        drawing.text(center, 136, "What holds ranks up?", anchor="middle", color=MUTED)
        for y, height, (reason, option) in zip((146, 216, 320), (36, 70, 36), rows, strict=True):
            drawing.text(left + 6, y + 16, reason)
            drawing.box(left, y + 24, width, height, option, color)
    drawing.box(MARGIN, 394, RIGHT - MARGIN, 32, "Do processes die?", IDLE)
    for left, launch, text in (
        (columns[0], "launch/run --elastic", "all but --quorum"),
        (columns[1], "launch/run --restarts", "--quorum"),
    ):
        drawing.arrow((left + width / 2, 426), (left + width / 2, 444))
        drawing.box(left, 446, width, 30, launch, COMMUNICATE)
        drawing.text(left + 6, 496, text)
    return drawing.svg(510)


def goodput() -> str:
    """Goodput and number of ranks, for docs/modes.md."""
    hours = 1000
    lines = {
        ("sync, restarts", "as built"): ("sync mode, --restarts", COMMUNICATE.line, False),
        ("sync, elastic", "as built"): ("sync mode, --elastic", COMPUTE.line, False),
        ("wait-free, elastic", "as built"): ("--wait-free, --elastic", STORE.line, False),
        ("wait-free, elastic", "members change in 0.3 s"): ("… if members changed in 0.3 s", STORE.line, True),
    }
    rows = json.loads((ROOT / "benchmarks" / "results" / "simulated_goodput.json").read_text())
    drawing = Drawing(
        "Goodput, simulated",
        "Useful samples of those that all ranks could compute alone, on 16 to 4,096 ranks. Each rank fails every "
        f"{hours:,} hours.",
    )
    top, bottom, left, right = 66, 286, 52, RIGHT - 8
    ranks = sorted({row["ranks"] for row in rows})

    def place(count: int, share: float) -> tuple[float, float]:
        across = math.log(count / ranks[0]) / math.log(ranks[-1] / ranks[0])
        return left + across * (right - left), bottom - share * (bottom - top)

    for share in (0, 0.25, 0.5, 0.75, 1):
        drawing.line((left, place(ranks[0], share)[1]), (right, place(ranks[0], share)[1]), color=IDLE.line, width=0.5)
        drawing.text(left - 8, place(ranks[0], share)[1] + 5, f"{share:.0%}", anchor="end", color=MUTED)
    for count in ranks:
        drawing.text(place(count, 0)[0], bottom + 20, f"{count:,}", anchor="middle", color=MUTED)
    drawing.text((left + right) / 2, bottom + 42, "ranks", anchor="middle", color=MUTED)
    for number, ((way, changes), (label, color, dashed)) in enumerate(lines.items()):
        found = {
            row["ranks"]: statistics.mean(row["goodput"])
            for row in rows
            if (row["way"], row["setting"]) == (way, f"{row['ranks']} ranks, {changes}")
            and row["rank_mtbf_hours"] == hours
        }
        drawing.line(*(place(count, found[count]) for count in ranks), color=color, width=2.5, dashed=dashed)
        y = bottom + 66 + 22 * number
        drawing.line((MARGIN, y), (MARGIN + 28, y), color=color, width=2.5, dashed=dashed)
        drawing.text(MARGIN + 36, y + 5, label)
    drawing.text(MARGIN, bottom + 164, f"Each rank fails every {hours:,} h on average.", color=MUTED)
    return drawing.svg(bottom + 180)


def measured_pause() -> str:
    """Seconds from SIGKILL to the end of the next step (benchmarks/elastic.py)."""
    return _result(r"from SIGKILL to the end of the next step ([\d.]+) s")


def measured_join() -> str:
    """The longest seconds between two steps while a process joins (benchmarks/elastic.py)."""
    return _result(r"longest time between two steps while a process joins ([\d.]+) s")


def measured_horovod() -> str:
    """The same as :func:`measured_pause`, of Horovod's own elastic mode: the median of three."""
    return sorted(re.findall(r"[\d.]+\d", _result(r"on the host of the killed one\): ([\d., and]+) s from SIGKILL")))[1]


def _result(pattern: str) -> str:
    text = " ".join((ROOT / "docs" / "results.md").read_text().split())
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"docs/results.md must have what is drawn from it: {pattern}")
    return found[1]


_TRAINERS = {
    "hvdtrain": "hvdtrain",
    "raw Horovod, tuned": "Horovod, hand-written loop",
    "MultiWorkerMirrored": "tf.distribute MultiWorkerMirrored",
    "PyTorch DDP": "PyTorch DDP (Gloo)",
    "Keras on JAX": "Keras on JAX, DataParallel",
    "Keras on PyTorch": "Keras on PyTorch, DataParallel",
}


def _speeds(ranks: int, network: str) -> dict[str, tuple[float, float, float]]:
    """Samples a second over all ranks of each trainer, in its fastest case: quartiles."""
    found = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())["step_ms"][f"{ranks} rank(s)"]
    speeds = {}
    for trainer, name in _TRAINERS.items():
        cases = [times for case, times in found[trainer].items() if case.startswith(f"{network}, ")]
        fastest = min(cases, key=statistics.median)
        low, median, high = statistics.quantiles(fastest, n=4, method="inclusive")
        speeds[name] = tuple(ranks * BATCH_SIZES[network] / ms * 1e3 for ms in (high, median, low))
    return speeds


PICTURES: dict[str, Callable[[], str]] = {
    "sync-step": sync_step,
    "local-sgd": local_sgd,
    "quorum": quorum,
    "elastic": elastic,
    "gradient": gradient,
    "checkpoint": checkpoint,
    "trainers": trainers,
    "recovery": recovery,
    "modes": modes,
    "goodput": goodput,
}
"""By the name of the file."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
