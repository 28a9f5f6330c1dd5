"""``hvdtrain report``: what the page of a run shows, and that what is in its files cannot hurt it."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

import hvdtrain
from hvdtrain.commands import cli
from hvdtrain.errors import DataError, UsageError
from hvdtrain.loggers.rank_times import RankTimesReporter
from hvdtrain.loggers.reporter import RunShape
from hvdtrain.runs.report import page, step_parts
from hvdtrain.runs.report.facts import differences, made_with, notes
from hvdtrain.runs.report.figures import figures
from hvdtrain.runs.run_files import open_run_files
from hvdtrain.runs.run_record import read_files, read_run
from hvdtrain.stores.store import Store

SHAPE = RunShape(2000, 100)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def make_run(folder, *, name="<script>alert(1)</script>", slow=1, batch_size=32, steps=100):
    """A run of three ranks, one of them slow and then lost."""
    folder.mkdir()
    train = [
        {"event": "train", "step": s, "samples": 96 * s, "elapsed_seconds": 0.1 * s, "loss": 2 / s, "accuracy": 0.5}
        for s in range(10, steps + 1, 10)
    ]
    lines = [
        {"event": "start", "task": name, "ranks": "3 on 1 host(s)"},
        *train,
        {"event": "eval", "step": 50, "samples": 4800, "elapsed_seconds": 5.0, "loss": 0.1, "accuracy": 0.75},
        {"event": "members", "step": 60, "ranks": 2, "ranks_before": 3, "pause_seconds": 0.25},
        {"event": "checkpoint", "step": 80, "blocked_seconds": 0.5},
        {"event": "warning", "step": 70, "text": f"{name} is slow"},
    ]
    write_lines(folder / "metrics.jsonl", sorted(lines, key=lambda each: each.get("step", 0)))
    reporter = RankTimesReporter(folder / "ranks.jsonl")
    reporter.started({}, SHAPE)
    seconds = np.full((3, steps, 3), [0.001, 0.010, 0.015])
    seconds[slow, :, 1:] = [0.020, 0.005]
    reporter.rank_times(steps, seconds, (20, 6, 6))
    (folder / "config.json").write_text(json.dumps({"task": name, "batch_size": batch_size, "run_dir": str(folder)}))
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "loss": 0.02}))
    return folder


def shown(html):
    """The text of a page."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", html))


def test_each_figure_shows_what_was_logged(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    found = {each.name: each for each in figures([run])}
    assert "loss-samples" not in found, "it would be that over steps"
    loss = found["loss-step"]
    assert [line.is_dashed for line in loss.lines] == [False, True]
    assert loss.lines[0].x == [10 * i for i in range(1, 11)]
    assert loss.lines[0].y == [2 / (10 * i) for i in range(1, 11)]
    assert loss.is_logarithmic
    assert found["metric-accuracy"].lines[1].y == [0.75]
    assert (found["members"].lines[0].x, found["members"].lines[0].y) == ([0, 60, 100], [3, 2, 2])
    assert found["stops-members"].y == [0.25]
    assert (found["stops-checkpoint"].x, found["stops-checkpoint"].y) == ([80], [0.5])
    assert [line.y for line in found["shares"].lines] == [[20, 20], [6, 6], [6, 6]]
    parts = found["step-parts"]
    heights = {name: values[0] for name, values in parts.heights.items()}
    assert heights == pytest.approx({"compute": 9, "input": 1, "waiting": 10, "communication": 5})
    ranks = found["ranks"]
    assert "Rank 1 is the slowest in 100 % of the columns, by a factor of 2.0, from step 1 on." in ranks.says
    assert ranks.row == [0, 1, 2] * 2
    assert ranks.ratio[:3] == [1, 2, 1]
    assert (ranks.left[0], ranks.right[0], ranks.right[-1]) == (1, 65, 101)
    assert notes(run) == [
        ("60", "1 rank lost, or left; 2 ranks from here on, after a pause of 0.25 s"),
        ("70", "<script>alert(1)</script> is slow"),
    ]


def test_the_page_needs_no_network_and_what_a_run_says_is_text(tmp_path):
    make_run(tmp_path / "run")
    output = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    html = output.read_text()
    assert len(html) < 5_000_000
    assert "<script>alert" not in html
    assert "default-src 'none'" in html, "a browser asks no other host"
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", re.sub(r"(?s)<script.*?</script>", "", html))
    text = shown(html)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; is slow" in text
    assert "Where the time goes" in text
    assert "Learning rate" not in text, "a figure without values is left out"


def test_several_runs_are_drawn_together_with_what_differs(tmp_path):
    runs = [read_run(make_run(tmp_path / name, batch_size=size)) for name, size in (("a", 32), ("b", 64))]
    (tmp_path / "b" / "provenance.json").write_text(json.dumps({"code": {"train.py": "1a2b"}, "versions": {}, "x": 3}))
    runs[1] = read_run(tmp_path / "b")
    assert differences(runs) == [("batch_size", ["32", "64"]), ("code: train.py", ["", "1a2b"])]
    found = {each.name: each for each in figures(runs)}
    assert len(found["loss-step"].lines) == 4
    assert not {"ranks", "step-parts", "members"} & set(found)
    assert "What differs" in shown(page.html(runs))
    html = hvdtrain.report(*(run.name for run in runs))._repr_html_()
    assert html.startswith("<iframe")
    assert "What differs" in html


def test_ranks_are_slow_only_if_the_others_wait_for_them(tmp_path):
    reporter = RankTimesReporter(tmp_path / "ranks.jsonl")
    seconds = np.full((3, 256, 3), 0.010)
    seconds[2, :, 1] = 0.0105
    reporter.rank_times(256, seconds, (1, 1, 1))
    assert step_parts.straggler(read_run(tmp_path).rank_times) is None
    seconds[2, 64:, 1] = 0.030
    reporter.rank_times(512, seconds, (1, 1, 1))
    by_chance = [{**line, "ready_ms": [10, 10, 12]} for line in read_run(tmp_path).rank_times[1:2]]
    lines = read_run(tmp_path).rank_times
    assert step_parts.straggler([*by_chance, *lines[2:]]).first_step == 321
    seconds[2, :, 1] = 0.040
    reporter.rank_times(1024, seconds, (1, 1, 1))
    run = read_run(tmp_path)
    assert step_parts.straggler(run.rank_times[4:]) == step_parts.Straggler(2, 7 / 8, 4, 321)
    # Steps 513 to 768 are missing: nothing is drawn across them.
    parts = next(each for each in figures([run]) if each.name == "step-parts")
    totals = map(sum, zip(*parts.heights.values(), strict=True))
    assert [x for x, total in zip(parts.x, totals, strict=True) if total == 0] == [512, 769]


def test_several_batch_sizes_are_drawn_over_samples(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = [{"event": "train", "step": s, "samples": 8 * s * s, "loss": 1.0} for s in range(1, 9)]
    write_lines(folder / "metrics.jsonl", lines)
    assert "loss-samples" in {each.name for each in figures([read_run(folder)])}


def test_what_happened_says_how_long_a_run_was_away(tmp_path):
    folder = make_run(tmp_path / "run")
    members = {"event": "members", "step": 3, "ranks": 3, "ranks_before": 1}
    resume = {"event": "resume", "step": 9, "time": 61.0, "checkpoint": "/a/path/step-00000009"}
    lines = [members, {"event": "train", "step": 9, "time": 1.0}, {"event": "start", "time": 59.0}, resume]
    write_lines(folder / "metrics.jsonl", [*lines, {"event": "members", "step": 10, "ranks": 1}])
    assert notes(read_run(folder)) == [
        ("3", "2 ranks joined; 3 ranks from here on"),
        ("9", "resumed from step-00000009, 60 s after the last line before"),
        ("10", "the ranks changed; 1 rank from here on"),
    ]


def test_what_steps_lost_is_drawn(tmp_path):
    folder = make_run(tmp_path / "run")
    lost = {"loss_scale": 16384.0, "skipped_steps": 1, "bad_samples": 2, "compression_error": 0.3}
    write_lines(folder / "metrics.jsonl", [{"event": "train", "step": 10, "samples": 1, "loss": 1.0, **lost}])
    found = {each.name: each for each in figures([read_run(folder)])}
    assert {name: found[f"value-{name}"].lines[0].y for name in lost} == {name: [y] for name, y in lost.items()}
    assert not any(name.startswith("metric-") for name in found)


def test_predictions_are_drawn_beside_what_was_measured(tmp_path):
    rows = [
        {"mode": mode, "allreduce": "flat", "ranks": ranks, "step_ms": ranks * slowdown}
        for mode, slowdown in (("sync", 10), ("local", 5))
        for ranks in (8, 2)
    ]
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "bench.json").write_text(json.dumps({"prediction": {"rows": [*rows, {"ranks": "x", "step_ms": 1}, 7]}}))
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text(json.dumps({"ranks": 4, "step_ms": {"p50": 41.5}}))
    records = [read_run(run), read_run(bench)]
    scaling = next(each for each in figures(records) if each.name == "scaling")
    assert [(line.x, line.y, line.is_dashed) for line in scaling.lines] == [
        ([2, 8], [20, 80], True),
        ([2, 8], [10, 40], True),
        ([4], [41.5], False),
    ]
    assert "scaling" not in {each.name for each in figures(records[:1])}
    for damaged in ({"prediction": 3}, {"prediction": {"rows": 3}}, {"prediction": {}}):
        (bench / "bench.json").write_text(json.dumps(damaged))
        assert figures([read_run(bench)]) == []


TASK_OF_TWO_FILES = """
import keras
import numpy as np
from its_layers import make_layers

import hvdtrain

X = np.ones((64, 4), "float32")
TASK = hvdtrain.Task(
    model=lambda data: keras.Sequential([keras.layers.Input((4,)), *make_layers()]),
    data=lambda folder: hvdtrain.data.Data(hvdtrain.data.Arrays(X, X[:, :1])),
    loss="mse",
)
"""


@pytest.mark.slow
def test_a_run_records_what_it_is_made_with_and_what_its_steps_lost(tmp_path):
    (tmp_path / "its_task.py").write_text(TASK_OF_TWO_FILES)
    for name, activation in (("a", "relu"), ("b", "tanh")):
        layer = f"keras.layers.Dense(1, {activation!r})"
        (tmp_path / "its_layers.py").write_text(f"import keras\n\n\ndef make_layers():\n    return [{layer}]\n")
        words = ["--task", "its_task.py", "--run-dir", name, "--steps", "3", "--log-every", "1"]
        command = [sys.executable, "-m", "hvdtrain", *words, "--mixed-precision", "float16"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    runs = [read_run(tmp_path / name) for name in ("a", "b")]
    ((name, digests),) = differences(runs)
    assert name == "code: its_layers.py"
    assert len(set(digests)) == 2
    shown_facts = dict(made_with(runs[0]))
    assert shown_facts["training data: samples"] == "64"
    assert shown_facts[f"ranks per host: {socket.gethostname()}"] == "1"
    assert {"versions: keras", "code: hvdtrain", "code: its_task.py"} < set(shown_facts)
    assert "value-loss_scale" in {each.name for each in figures(runs)}


def test_a_live_page_downloads_only_what_has_changed(url, tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    store = Store(url)
    for path in folder.iterdir():
        store.upload(path, path.name)
    downloaded = []
    download = Store.download

    def count(self, name, path):
        downloaded.append(name)
        download(self, name, path)

    monkeypatch.setattr(Store, "download", count)
    with open_run_files(url) as files:
        first = read_files(files)
        assert sorted(downloaded) == sorted(path.name for path in folder.iterdir())
        downloaded.clear()
        assert read_files(files) == first
        assert downloaded == []
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": "end", "step": 100}) + "\n")
        store.upload(folder / "metrics.jsonl", "metrics.jsonl")
        assert read_files(files).last("end")
        assert downloaded == ["metrics.jsonl"]
        store.delete("summary.json")
        assert read_files(files).summary == {}


def test_a_run_that_is_damaged_being_written_or_of_another_version_shows_what_there_is(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    good = [*(folder / "ranks.jsonl").read_text().splitlines(), *(folder / "metrics.jsonl").read_text().splitlines()]
    bad = [
        *('{"event": "times"}', '{"event": "times", "first_step": 1, "step": 2, "ranks": 2, "ready_ms": "x"}', '{"ev'),
        '{"event": "times", "first_step": 1, "step": 2, "ranks": 2, "ready_ms": [NaN, 1], "input_ms": [1, 1], '
        '"reduction_ms": [1, 1]}',
        *('{"event": "train", "step": "x", "loss": 1}', '{"event": "train", "step": 5, "loss": null}', "[]", "7"),
        *('{"event": "members", "step": 5, "ranks": [], "pause_seconds": {}}', '{"event": "warning", "step": {}}'),
        '{"event": "train", "step": 6, "samples": Infinity, "elapsed_seconds": NaN, "loss": -Infinity}',
    ]
    for name in ("ranks.jsonl", "metrics.jsonl"):
        (folder / name).write_text("\n".join([*bad, *good, *bad]))
    text = shown(page.html([read_run(folder)]))
    assert "not complete, or still running" in text
    assert "Where the time goes" in text
    for name in ("metrics.jsonl", "ranks.jsonl", "config.json"):
        (folder / name).unlink()
        assert "The run" in shown(page.html([read_run(folder)]))
    (folder / "summary.json").unlink()
    with pytest.raises(DataError, match="RUN must be a run directory"):
        read_run(folder)


@pytest.mark.parametrize("num_ranks", [64, 4096])
def test_the_times_of_many_ranks_and_steps_stay_small(num_ranks, tmp_path):
    reporter = RankTimesReporter(tmp_path / "ranks.jsonl")
    reporter.started({}, SHAPE)
    seconds = np.random.default_rng(0).uniform(0.01, 0.02, (num_ranks, 512, 3))
    seconds[7, :, 1] = 0.1
    reporter.rank_times(512, seconds, [1] * num_ranks)
    size = (tmp_path / "ranks.jsonl").stat().st_size
    assert size * (1_000_000 / 512) < 50e6
    lines = step_parts.usable(read_run(tmp_path).rank_times)
    assert [line["step"] for line in lines] == list(range(64, 513, 64))
    assert all(step_parts.straggler([line]).rank == 7 for line in lines)
    assert len(step_parts.ranks(lines[0])) == (64 if num_ranks == 64 else 10)
    assert "Rank 7 is the slowest" in next(each for each in figures([read_run(tmp_path)]) if each.name == "ranks").says


@pytest.mark.slow
def test_long_runs_give_pages_of_the_same_size(tmp_path):
    sizes = [len(page.html([read_run(make_run(tmp_path / str(steps), steps=steps))])) for steps in (100_000, 300_000)]
    assert sizes[1] < 1.1 * sizes[0]


def test_resumed_runs_replace_the_times_of_steps_that_are_made_again(tmp_path):
    reporter = RankTimesReporter(tmp_path / "ranks.jsonl")
    reporter.started({}, SHAPE)
    reporter.rank_times(192, np.ones((2, 192, 3)), (1, 1))
    reporter = RankTimesReporter(tmp_path / "ranks.jsonl")
    reporter.started({}, RunShape(2000, 100, resumed_step=130))
    reporter.rank_times(200, np.ones((2, 70, 3)), (1, 1))
    assert [line["first_step"] for line in read_run(tmp_path).rank_times] == [1, 65, 131, 195]


def test_steps_without_a_reduction_are_left_out(tmp_path):
    reporter = RankTimesReporter(tmp_path / "ranks.jsonl")
    seconds = np.ones((2, 128, 3))
    seconds[:, 3, 1:] = np.nan
    seconds[:, 64:, 1:] = np.nan
    reporter.rank_times(128, seconds, (1, 1))
    (line,) = read_run(tmp_path).rank_times
    assert line["ready_ms"] == [1000, 1000]


class Served:
    """``hvdtrain report --serve`` as a process."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "hvdtrain", "report", *words, "--serve"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().split()[0]

    def get(self, path="", **headers):
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=60) as answer:
            return answer.status, answer.read()

    def values(self):
        return json.loads(self.get("values.json")[1])

    def end(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=60)


@pytest.fixture
def served(tmp_path):
    found = Served(str(make_run(tmp_path / "run")))
    yield found
    found.process.kill()
    found.process.communicate()


def test_a_live_page_follows_the_run(served, tmp_path):
    assert b"values.json" in served.get()[1]
    before = served.values()
    assert served.get(f"values.json?version={before['version']}") == (204, b"")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "train", "step": 110, "samples": 10560, "elapsed_seconds": 11, "loss": 0.25}) + "\n"
        )
    began_s = time.monotonic()
    while (after := served.values())["version"] == before["version"]:
        assert time.monotonic() < began_s + 30
        time.sleep(0.1)
    assert after["layout"] == before["layout"]
    assert after["sources"]["loss-step 0"]["y"][-1] == 0.25
    # A run that is being replaced: what was read last is shown.
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    time.sleep(1.2)
    assert served.values()["sources"] == after["sources"]
    assert served.end() == ("\n", "")
    assert served.process.returncode == 0


def test_only_who_knows_the_token_can_read_a_run(served):
    address, token = served.url.rstrip("/").rsplit("/", 1)
    paths = ["", "/", "/values.json", "//values.json", f"/{token[:-1]}/", f"/{token}x/values.json", f"/%00{token}/"]
    for path in [*paths, f"/{token}/../../etc/passwd", f"/{token}/summary.json", "/\u00e9/".encode().decode("latin-1")]:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address + urllib.parse.quote(path, safe="/%."), timeout=60)
    assert served.get("values.json", Host="localhost:9999")[0] == 200, "a port that ssh forwards"
    port = int(address.rpartition(":")[2])
    with socket.socket() as elsewhere, pytest.raises(OSError, match=r"refused"):
        elsewhere.connect(("127.0.0.2", port))


def test_what_cannot_be_reported_is_refused(tmp_path, monkeypatch, capsys):
    assert cli.main(["report"]) == 64
    assert cli.main(["report", str(tmp_path)]) == 65
    run = str(make_run(tmp_path / "run"))
    assert cli.main(["report", run, "--output", str(tmp_path / "no" / "page.html")]) == 65
    assert cli.main(["report", run, "--serve", "--address", "192.0.2.1"]) == 64
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert cli.main(["report", run]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(". Received")[0] for line in lines] == [
        "hvdtrain: RUN is missing. For example: hvdtrain report runs/digits",
        "hvdtrain: RUN must be a run directory",
        "hvdtrain: --output must be a file that can be written",
        "hvdtrain: --port must be free, and --address one of this host",
        "hvdtrain: reports need Bokeh",
    ]
    with pytest.raises(UsageError, match="report needs a run"):
        hvdtrain.report()
