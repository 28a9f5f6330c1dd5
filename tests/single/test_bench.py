"""The statistics and report of bench; tests/parallel/test_jobs.py runs measurements."""

import json
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.commands import cli
from hvdtrain.commands.bench import gpu_copies, measurements, report
from hvdtrain.commands.bench.cases import ALONE, INDEPENDENT, LOCAL, SYNC, Block
from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.config.fields import as_dict
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.errors import UsageError
from hvdtrain.system import devices

pytestmark = pytest.mark.usefixtures("as_a_command")

# Two ranks, of which the second is slower and has smaller batches; four measurements of ten steps each.
SECONDS = [(1.0, 2.0), (1.0, 2.2), (1.0, 2.0), (1.0, 2.2)]
MEASURED = {
    SYNC: [[Block(10, a, 0.5, 320), Block(10, b, 1.5, 160)] for a, b in SECONDS],
    ALONE: [[Block(10, a, 0.5, 320)] for a, _ in SECONDS],
}


def test_step_time_is_that_of_the_slowest_rank_and_examples_are_summed():
    assert measurements.seconds_per_step(MEASURED, SYNC) == pytest.approx([0.2, 0.22, 0.2, 0.22])
    case = measurements.describe(MEASURED, SYNC, calls_ms=[float(i) for i in range(101)])
    assert case["ranks"] == 2
    assert case["step_ms"] == pytest.approx(210)
    assert case["step_ms_range"] == pytest.approx([200, 220])
    assert (case["step_ms_p50"], case["step_ms_p95"]) == (50, 95)
    # 320 samples per second, and 160 in 2.0 or 2.2 seconds.
    assert case["examples_per_second"] == pytest.approx(320 + (80 + 160 / 2.2) / 2)
    assert case["cpu_seconds_per_step"] == pytest.approx(0.2)
    assert measurements.describe(MEASURED, ALONE, [1.0])["ranks"] == 1


def test_ratios_are_paired():
    assert measurements.ratio(MEASURED, SYNC, ALONE) == pytest.approx({"median": 2.1, "min": 2.0, "max": 2.2})


def test_unsteady_measurements_are_marked():
    assert measurements.spread([2.0, 2.2, 2.0, 2.2]) == pytest.approx(0.1)
    assert measurements.spread([1.0, 1.0, 9.0, 1.0, 1.0]) == 0, "a single outlier does not count"
    assert measurements.unsteadiness(MEASURED, SYNC, 0.11) is None
    assert measurements.unsteadiness(MEASURED, SYNC, 0.09).startswith(
        "two measurements of 'sync' must differ by at most 9%. Received: 200.000 and 220.000 ms per step, 10% apart"
    )


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"fp16": 0.6, "powersgd:4": 0.2}, "powersgd:4"),
        ({"fp16": 0.6, "powersgd:4": 0.55}, "fp16"),
        ({"fp16": 0.95, "powersgd:4": 1.2}, "none"),
    ],
)
def test_a_compression_is_recommended_for_a_tenth_of_a_step(times, name):
    assert measurements.recommended(times) == name


def test_report_of_compressions():
    bytes_per_step = {SYNC: 4_000_000, "sync, fp16": 2_000_000}
    text = report.table({**found(2), "bytes_per_step": bytes_per_step, "recommended_compression": "fp16"})
    assert "gradients of a step, sync: 4,000,000 bytes\n" in text
    assert "gradients of a step, sync, fp16: 2,000,000 bytes, 1/2.0 of those of sync\n" in text
    assert "recommended: --compression fp16\n" in text


def test_report_marks_unsteady_cases_and_their_ratios():
    reported = found(2)
    reported["cases"][SYNC] = {**reported["cases"][SYNC], "unsteady": "two measurements differ"}
    lines = report.table(reported).splitlines()
    assert [line.split()[0] for line in lines if "*" in line] == ["sync", "sync", "*"]
    assert "sync over no communication: 1.020* (1.000 to 1.100)" in lines
    assert lines[-1] == "* unsteady: two measurements differ"
    assert "*" not in report.table(found(2))


def found(ranks: int) -> dict:
    names = (ALONE, INDEPENDENT, SYNC, LOCAL) if ranks > 1 else (ALONE,)
    case = {**measurements.describe(MEASURED, ALONE, [1.0]), "unsteady": None}
    skew = {"slowest_rank": 1, "slowest_host": "b", "slowest_share": 0.9, "ratio": 2.0}
    skew = {**skew, "remedy": {"option": "--balance", "speedup": 1.5}} if ranks > 1 else None
    made = {
        **{"task": "digits", "ranks": ranks, "hosts": 1, "scaling_efficiency": 0.9},
        "cases": dict.fromkeys(names, case),
        "ratios": {"sync over no communication": {"median": 1.02, "min": 1.0, "max": 1.1}} if ranks > 1 else {},
        "shares": {"input_fraction": 0.01, "compute_fraction": 0.9, "communication_fraction": 0.09, "skew": skew},
    }
    row = {"bytes": 4, "seconds": 1e-3, "mpi_seconds": None, "over_mpi": None, "sent_bits_per_second": 3.2e4}
    if ranks > 1:
        other = {**row, "mpi_seconds": 5e-4, "over_mpi": 2.0}
        made["network"] = {"allreduce": [row, other], "link_bits_per_second": {"b": 9.4e8, "c": None}}
        made["network"] |= {"busy_cores": 0.98, "polling": "MPI polls: …"}
        made["cases"][SYNC] = {**case, "cpu_seconds_per_step": case["cpu_seconds_per_step"] + 0.0123 * ranks}
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_report(ranks, tmp_path):
    text = report.table(found(ranks))
    assert "one rank alone" in text
    assert "of a sync step: input 1.0%, compute 90.0%, communication 9.0%" in text or ranks == 1
    if ranks > 1:
        assert "sync over no communication: 1.020 (1.000 to 1.100)" in text
        assert "rank 1 (host b) is last in 90% of steps, 2.00 times the median\n" in text
        assert "recommended: --balance, about 1.50 times as many samples/s\n" in text
        assert "allreduce of 4 bytes: 1.000 ms, each rank sends 0 Mbit/s" in text
        assert "allreduce of 4 bytes: 1.000 ms, 2.00x the time of a bare MPI_Allreduce" in text
        assert "communication: 12.3 ms of CPU time per rank and step; a rank in an allreduce uses 0.98 cores" in text
        assert text.endswith("\nMPI polls: …")
        assert "one connection to b: 940 Mbit/s\none connection to c: cannot be reached over TCP" in text
    assert report.draw(found(ranks), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_copies_to_and_from_a_gpu(monkeypatch):
    hvdtrain.init()
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    data = hvdtrain.data.Arrays(np.zeros((16, 5), np.uint8), np.zeros((16, 3), np.float32))
    runner = SimpleNamespace(model=model, source=data, plan=SamplePlan(num_samples=16, batch_size=8))
    monkeypatch.setattr(devices, "own_gpu", lambda: None)
    assert gpu_copies.measure(runner) is None
    monkeypatch.setattr(devices, "own_gpu", lambda: "/CPU:0")
    copies = gpu_copies.measure(runner)
    # With a factor for the loss.
    assert copies["batch to GPU"]["bytes"] == 8 * (5 + 4 * 3) + 4
    assert copies["gradients to host"]["bytes"] == 4 * (5 * 3 + 3)
    assert all(copy["seconds"] > 0 for copy in copies.values())
    copies["batch to GPU"]["seconds"] = 0.0025
    assert "\ncopy, batch to GPU: 2.500 ms for 140 bytes\n" in report.table({**found(1), "copies": copies}) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "3"], "--blocks must be at least 4. Received: 3"),
        (["--compressions", "fp16,none"], "--compressions must be compressions separated by commas"),
        (["--compressions", "gzip"], "--compression must be none, fp16, or powersgd:RANK"),
        (["--max-spread", "0"], "--max-spread must be a finite number above 0. Received: 0.0"),
        (["--wait-free"], "bench excludes --wait-free"),
        (["--checkpoint-every", "3"], "Unknown option: --checkpoint-every"),
    ],
)
def test_invalid_options_are_rejected(arguments, message):
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        cli.parse("bench", arguments)


def test_training_options_that_affect_a_step():
    parsed = cli.parse("bench", ["--task", "mnist", "--batch-size", "8", "--sync-every", "4", "--blocks", "6"])
    assert isinstance(parsed, BenchConfig)
    found = as_dict(parsed)
    assert [found[name] for name in ("task", "batch_size", "sync_every", "blocks")] == ["mnist", 8, 4, 6]
    assert parsed.explicitly_set == {"task", "batch_size", "sync_every", "blocks"}
    assert "steps" not in found


DEEP_TASK = """
import keras, numpy as np
import hvdtrain

def model(data):
    return keras.Sequential([keras.layers.Input((800,)), *(keras.layers.Dense(800) for _ in range(4))])

def data(folder):
    return hvdtrain.data.Data(hvdtrain.data.Arrays(np.zeros((512, 800), "f"), np.zeros((512, 800), "f")))

TASK = hvdtrain.Task(model=model, data=data, loss="mse", optimizer="sgd", defaults={"batch_size": 256})
"""


@pytest.mark.slow
def test_bench_of_one_process(tmp_path):
    (tmp_path / "deep.py").write_text(DEEP_TASK)
    line = ["bench", "--task", str(tmp_path / "deep.py:TASK"), "--output", str(tmp_path), "--predict", "1"]
    line += ["--blocks", "4", "--block-seconds", "0.1", "--max-spread", "1e-9"]
    code = "import sys; sys.modules['matplotlib'] = None; from hvdtrain.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'bench.png'} was not drawn: figures need matplotlib. Install it: " in done.stdout
    assert "* unsteady: two measurements of 'one rank alone' must differ by at most" in done.stdout
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["cases"].keys() == {"one rank alone"}
    assert found["shares"]["communication_fraction"] == 0
    assert "network" not in found
    sizes, ready = zip(*found["prediction"]["messages"], strict=True)
    assert sum(sizes) == 4 * found["parameters"]
    # The backward pass starts with the last layer.
    kernels = ready[1:]  # after the bucket of all biases
    # Neighbours may change places on a busy machine.
    assert 0 < kernels[0] < kernels[2] <= 1
    assert 0 < kernels[1] < kernels[3] <= 1


DIVERGING = """
import keras
import numpy as np

import hvdtrain

x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
TASK = hvdtrain.Task(
    model=lambda data: keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]),
    data=lambda folder: hvdtrain.data.Data(hvdtrain.data.Arrays(x, x[:, :1])),
    loss=lambda: keras.losses.MeanSquaredError(),
    optimizer="sgd",
    defaults={"learning_rate": 1e6},
)
"""


@pytest.mark.slow
def test_a_model_that_would_diverge_is_measured(tmp_path):
    task = tmp_path / "diverging.py"
    task.write_text(DIVERGING)
    measurement = ["--blocks", "4", "--block-seconds", "0.05", "--max-spread", "100", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "bench", "--task", str(task), *measurement],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["cases"][ALONE]["step_ms"] > 0
