"""Reporters: progress bar, console lines, JSON lines."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hvdtrain.loggers.console import ConsoleReporter
from hvdtrain.loggers.json_lines import JsonLinesReporter
from hvdtrain.loggers.progress_bar import ProgressBarReporter, console_reporter
from hvdtrain.loggers.reporter import CompositeReporter, Reporter, RunShape
from hvdtrain.system.json_files import read_lines

SHAPE = RunShape(total_steps=40, steps_per_epoch=16, global_batch_size=32, samples_per_epoch=500)
VALUES = {"loss": 0.25, "accuracy": 0.9, "learning_rate": 0.1, "gradient_norm": 2.5, "examples/s": 1234.5}
SUMMARY = {"steps": 40, "ranks": 2, "wall_seconds": 3.14, "eval": {}, "weights_sha256": "abc"}
DETAILS = {
    "epochs": 2.5,
    "eval": {"loss": 0.5},
    "examples_per_second": 22887.4,
    "step_ms": {"p50": 2.449, "p95": 4.7},
    "input_fraction": 0.01,
    "compute_fraction": 0.8,
    "communication_fraction": 0.19,
    "skew": {
        **{"slowest_rank": 1, "slowest_host": "b", "slowest_share": 0.63, "ratio": 1.04},
        "remedy": {"option": "--balance", "speedup": 1.5},
    },
    "skipped_steps": 3,
    "bad_samples": 1,
    "compression_error": 2.3e-4,
}


def finished_lines(**details: object) -> list[str]:
    stream = io.StringIO()
    ConsoleReporter(stream).finished({**SUMMARY, **details})
    return stream.getvalue().splitlines()


def test_console_prints_a_line_per_event():
    stream = io.StringIO()
    reporter = ConsoleReporter(stream)
    reporter.started({"task": "digits", "ranks": 2}, SHAPE)
    reporter.progressed(10, VALUES)
    reporter.evaluated(16, {"loss": 0.5})
    reporter.warned(17, "a step was skipped")
    reporter.close()
    first, second, *events = stream.getvalue().splitlines()
    assert (first, second) == ("task: digits", "ranks: 2")
    assert all(re.match(r"\d\d:\d\d:\d\d  step ", line) for line in events)
    assert [line[10:] for line in events] == [
        "step 10  loss 0.25  accuracy 0.9  learning_rate 0.1  gradient_norm 2.5  examples/s 1234",
        "step 16  evaluation: loss 0.5",
        "step 17  warning: a step was skipped",
    ]


@pytest.mark.parametrize("ending", ["finished", "close"])
def test_console_prints_a_log_line_a_second_and_all_other_events(ending, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    reporter = ConsoleReporter(stream, min_interval_s=1.0)
    for step in range(1, 24):  # eight a second
        reporter.progressed(step, {"loss": 0.25})
        if step == 14:  # A step with an evaluation shows both, in this order.
            reporter.evaluated(14, {"loss": 0.5})
        if step == 16:
            reporter.warned(16, "a step was skipped")
        now_s += 0.125
    reporter.finished(SUMMARY) if ending == "finished" else reporter.close()
    reporter.close()
    lines = [line[10:] for line in stream.getvalue().splitlines()]
    assert lines[: 7 if ending == "finished" else None] == [
        *[f"step {step}  loss 0.25" for step in (1, 9, 14)],
        *("step 14  evaluation: loss 0.5", "step 16  warning: a step was skipped"),
        *[f"step {step}  loss 0.25" for step in (17, 23)],
    ]


def test_each_line_is_one_write():
    writes = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    ConsoleReporter(Stream()).finished({**SUMMARY, **DETAILS})
    assert len(writes) == 11
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in writes)


def test_console_prints_a_table_at_the_end():
    assert finished_lines(**DETAILS) == [
        "done: 40 steps on 2 rank(s) in 3.1 s",
        "  steps            40 (2.5 epochs)",
        "  examples/s       22887",
        "  step time        2.45 ms (p50)  4.70 ms (p95)",
        "  share of step    input 1 %  compute 80 %  communication 19 %",
        "  slowest rank     1 (host b): last in 63 % of steps, 1.04 times the median",
        "  remedy           --balance: about 1.50 times as many samples/s",
        "  skipped          3 steps (not finite), 1 sample (unreadable)",
        "  compression      left out 2.3e-04 of the last gradient's norm, for the next step",
        "evaluation: loss 0.5",
        "weights: equal on all ranks",
    ]


@pytest.mark.parametrize(
    ("details", "rows"),
    [
        ({}, []),
        ({"skew": None, "skipped_steps": 0, "bad_samples": 0, "compression_error": None}, []),
        ({"communication_fraction": 0.0}, ["  share of step    communication 0 %"]),
        ({"skipped_steps": 1}, ["  skipped          1 step (not finite)"]),
        ({"bad_samples": 2}, ["  skipped          2 samples (unreadable)"]),
        (
            {"compression_error": 0.0},
            ["  compression      left out 0.0e+00 of the last gradient's norm, for the next step"],
        ),
    ],
)
def test_rows_without_a_value_are_omitted(details, rows):
    first, steps, *middle, last = finished_lines(**details)
    assert first.startswith("done: 40 steps on 2 rank(s) in ")
    assert steps == "  steps            40"
    assert middle == rows
    assert last == "weights: equal on all ranks"


def test_json_lines_contain_every_event(tmp_path):
    reporter = JsonLinesReporter(tmp_path / "metrics.jsonl")
    reporter.warned(0, "moved")
    reporter.started({"task": "digits"}, SHAPE)
    reporter.progressed(10, VALUES)
    reporter.evaluated(16, {"loss": 0.5})
    reporter.histograms(16, {"weights": {"kernel": np.ones(3)}})
    reporter.finished(SUMMARY)
    reporter.close()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(event.pop("time") > 0 for event in events)
    elapsed = [event.pop("elapsed_seconds") for event in events if event["event"] in ("train", "eval")]
    assert 0 <= elapsed[0] <= elapsed[1]
    assert events == [
        {"event": "warning", "step": 0, "text": "moved"},
        {"event": "start", "task": "digits"},
        {"event": "train", "step": 10, "epoch": 0.625, "samples": 320, **VALUES},
        {"event": "eval", "step": 16, "epoch": 1.0, "samples": 500, "loss": 0.5},
        {"event": "end", "step": 40},
    ]


def test_lines_after_the_resumed_step_are_removed_with_those_that_are_not_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = [b'{"event": "start"}\n', b'{"event": "train", "step": 10}\n', b'{"event": "eval", "step": 10.0}\n']
    removed = [
        *[b"null\n", b"5\n", b"[]\n", b'{"event": "train", "step": null}\n', b'{"event": "train", "step": "ten"}\n'],
        *[b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n", b'{"event": "train", "step": 11}\n', b'{"event": "tr'],
    ]
    path.write_bytes(b"".join([*kept, *removed]))
    reporter = JsonLinesReporter(path)
    reporter.started({}, RunShape(40, 16, resumed_step=10))
    reporter.resumed(10, Path("step-00000010"))
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[:3] == kept
    assert [json.loads(line)["event"] for line in lines[3:]] == ["start", "resume"]


def test_a_run_that_starts_again_from_its_first_step_logs_no_step_twice(tmp_path):
    for _ in range(2):  # The first one is killed before its first checkpoint.
        reporter = JsonLinesReporter(tmp_path / "metrics.jsonl")
        reporter.started({}, SHAPE)
        reporter.progressed(10, VALUES)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(each["event"], each.get("step")) for each in events] == [("start", None), ("start", None), ("train", 10)]


def test_elapsed_seconds_continue_at_the_last_line_before_the_checkpoint(tmp_path, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path = tmp_path / "metrics.jsonl"
    # Without the value, and damaged.
    path.write_text('{"event": "train", "step": 5}\n{"event": "train", "step": 6, "elapsed_seconds": "x"}\n')
    for resumed_step in (6, 20):
        reporter = JsonLinesReporter(path)
        reporter.started({}, dataclasses.replace(SHAPE, resumed_step=resumed_step))
        for step in (10, 20, 30):  # The first start loses step 30.
            if step > resumed_step:
                now_s += 2.0
                reporter.progressed(step, {})
        now_s += 500.0  # The job is down, or another machine's clock counts.
    events = read_lines(path)
    assert [each["elapsed_seconds"] for each in events if each.get("step", 0) > 6] == [2.0, 4.0, 6.0]
    assert [each["samples"] for each in events if each.get("step", 0) > 6] == [320, 500 + 4 * 32, 500 + 14 * 32]


EVENTS = [
    *("started", "reshaped", "model_built", "resumed", "progressed", "evaluated", "histograms", "warned", "finished"),
    *("members_changed", "saved", "rank_times", "profile_begins", "profile_ends", "already_complete", "close"),
]


class Recorder(Reporter):
    """Records all events."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def __getattribute__(self, name):
        if name in EVENTS:
            return lambda *arguments: self.events.append((name, *arguments))
        return super().__getattribute__(name)


def test_composite_forwards_every_event():
    assert {name for name in vars(Reporter) if not name.startswith("_")} == set(EVENTS)
    recorders = [Recorder(), Recorder()]
    composite = CompositeReporter(recorders)
    events = [
        ("started", {"task": "digits"}, SHAPE),
        ("model_built", "a model"),
        ("resumed", 5, Path("step-00000005")),
        ("progressed", 10, VALUES),
        ("evaluated", 16, {"loss": 0.5}),
        ("histograms", 16, {"weights": {"kernel": 1}}),
        ("members_changed", 16, {"ranks": 2, "ranks_before": 3, "pause_seconds": 0.4}),
        ("saved", 16, {"blocked_seconds": 0.1}),
        ("rank_times", 16, "times", [8, 8]),
        ("warned", 17, "a step was skipped"),
        ("finished", SUMMARY),
        ("already_complete", 20, Path("run")),
        ("close",),
    ]
    for name, *arguments in events:
        getattr(composite, name)(*arguments)
        getattr(Reporter(), name)(*arguments)  # accepts the same arguments and does nothing
    assert [recorder.events for recorder in recorders] == [events, events]


class Screen:
    """What a terminal shows after some output: lines, and whether the cursor is visible."""

    def __init__(self, output: str):
        self.lines = [""]
        self.cursor_is_visible = True
        row = 0
        for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output):
            if part == "\n":
                row += 1
                self.lines += [""] * (row - len(self.lines) + 1)
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[2K":
                self.lines[row] = ""
            elif part in ("\x1b[?25l", "\x1b[?25h"):
                self.cursor_is_visible = part.endswith("h")
            elif part != "\r" and not part.endswith("m"):
                self.lines[row] += part


def bar(width: int = 80) -> tuple[ProgressBarReporter, io.StringIO]:
    stream = io.StringIO()
    clock = iter(range(1000))
    console = Console(file=stream, force_terminal=True, width=width, get_time=lambda: float(next(clock)))
    return ProgressBarReporter(console), stream


def test_bar_shows_progress():
    reporter, stream = bar()
    reporter.started({"task": "digits [bold]"}, SHAPE)
    assert Screen(stream.getvalue()).lines[1].startswith("epoch 1/3 ")
    reporter.progressed(10, VALUES)
    reporter.progressed(20, {**VALUES, "loss": 0.125})
    screen = Screen(stream.getvalue())
    assert not screen.cursor_is_visible
    assert screen.lines[0] == "task: digits [bold]"
    assert re.fullmatch(r"epoch 2/3 ━+\S* ?\S*━* 20/40 1234 examples/s 0:0\d:[0-5]\d left", screen.lines[1]), (
        screen.lines
    )
    assert screen.lines[2:] == ["loss 0.125  accuracy 0.9"]
    reporter.close()


def test_evaluations_and_warnings_appear_above_the_bar():
    reporter, stream = bar()
    reporter.started({}, SHAPE)
    reporter.progressed(16, VALUES)
    reporter.evaluated(16, {"loss": 0.5})
    reporter.warned(17, "a step was skipped")
    reporter.progressed(32, VALUES)
    lines = Screen(stream.getvalue()).lines
    assert lines[0].endswith("step 16  evaluation: loss 0.5")
    assert lines[1].endswith("step 17  warning: a step was skipped")
    assert lines[2].startswith("epoch 2/3 ")
    assert len(lines) == 4
    reporter.close()


def test_many_metrics_fit_on_one_line():
    reporter, stream = bar(width=60)
    reporter.started({}, SHAPE)
    for step in (10, 20):
        reporter.progressed(step, {f"metric_{i}": 0.5 for i in range(20)})
    lines = Screen(stream.getvalue()).lines
    assert len(lines) == 2
    assert max(map(len, lines)) <= 60
    reporter.close()


@pytest.mark.parametrize("ending", ["finished", "closed after an error", "closed before the start"])
def test_bar_restores_the_terminal(ending):
    stdout = sys.stdout
    reporter, stream = bar()
    if ending != "closed before the start":
        reporter.started({}, SHAPE)
        reporter.progressed(10, VALUES)
    if ending == "finished":
        reporter.finished(SUMMARY)
    reporter.close()
    reporter.close()
    screen = Screen(stream.getvalue())
    assert screen.cursor_is_visible
    assert sys.stdout is stdout
    assert screen.lines[-1] == ""
    if ending == "finished":
        assert screen.lines[1] == "loss 0.25  accuracy 0.9"
        assert screen.lines[2].startswith("done: ")
        assert screen.lines[-2] == "weights: equal on all ranks"


def test_bar_on_a_pseudo_terminal(monkeypatch):
    screen, programs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(programs, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        reporter = console_reporter(is_terminal=True)
        reporter.started({"task": "digits"}, SHAPE)
        reporter.progressed(10, VALUES)
        print("printed by the model")
        reporter.progressed(40, VALUES)
        reporter.close()
        print("after", end="", flush=True)
        output = b""
        while b"after" not in output:
            assert select.select([screen], [], [], 10)[0], f"the terminal showed only {output!r}"
            output += os.read(screen, 65536)
    os.close(screen)
    shown = Screen(output.decode())
    assert shown.lines[:2] == ["task: digits", "printed by the model"]
    assert shown.lines[2].startswith("epoch 3/3 ━━━━")
    assert shown.lines[2].endswith(" 40/40 1234 examples/s 0:00:00 left")
    assert shown.lines[3:] == ["loss 0.25  accuracy 0.9", "after"]
    assert shown.cursor_is_visible


def test_no_bar_without_a_terminal(capsys):
    assert isinstance(console_reporter(is_terminal=True), ProgressBarReporter)
    reporter = console_reporter(is_terminal=False)
    reporter.started({}, SHAPE)
    reporter.progressed(10, {"loss": 0.25})
    assert re.fullmatch(r"\d\d:\d\d:\d\d  step 10  loss 0.25\n", capsys.readouterr().out)
