"""Input of a billion samples in 100,000 files: time and memory to open, to find a sample and to shuffle.

    launch/run python benchmarks/input_at_scale.py --folder /scratch     # needs 9 GB there
    launch/run python benchmarks/input_at_scale.py --orders    # only the order of samples; keeps other results
    launch/run python benchmarks/input_at_scale.py --scans     # only the first scan by 1 and 2 ranks; likewise

The files are real but short. The stored table of their records, which the ranks of the first host make when they open
them for the first time, is written by this script for 10,000 records per file; the time that one rank needs for it is
predicted from scanning one file. How much faster more ranks are is measured with 100 files that are full.
Prints lines marked run or predicted, and saves them to results/input_at_scale.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
FILES, RECORDS_PER_FILE = 100_000, 10_000
RECORD_BYTES = 100
BATCH = 32
RANKS = (2, 16, 64, 256, 1024, 4096)
_SCANNED_FILES = 100
_LOOKUPS = 20_000
_DRAWS = 99


def seconds(action: Callable[[], Any], repeats: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - began) / repeats


def private_mb() -> float:
    """Memory of this process that it does not share with other processes or the page cache."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def framed_record() -> bytes:
    from google_crc32c import value

    def checksum(data: bytes) -> bytes:
        crc = value(data)
        return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")

    data, length = bytes(RECORD_BYTES), RECORD_BYTES.to_bytes(8, "little")
    return length + checksum(length) + data + checksum(data)


def write_files(folder: Path) -> None:
    record = framed_record()
    folder.mkdir()
    for i in range(FILES):
        (folder / f"{i:05}.tfrecord").write_bytes(record)
    (folder.parent / "scanned.tfrecord").write_bytes(record * 1_000_000)


def write_table(files: list[Any]) -> None:
    """Stores what the first job would: the table of files with as many records as a real data set has."""
    from hvdtrain.data import record_table

    name = record_table._name(files)
    path = record_table._cached(files, name)
    frame = RECORD_BYTES + 16
    piece = (frame * np.arange(RECORDS_PER_FILE, dtype="<i8")).tobytes()
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        for _ in range(FILES):
            file.write(piece)
    each = (np.full(FILES, number, np.int64) for number in (RECORDS_PER_FILE, frame * RECORDS_PER_FILE, frame))
    record_table._store(path, record_table.FileTable(*each, {}, name))


def open_data(folder: Path) -> dict[str, float]:
    """Opens the data set as a rank does, and finds records. In a process of its own, for its memory."""
    from hvdtrain.data.record_files import find_files
    from hvdtrain.data.record_table import open_table
    from hvdtrain.distributed.single_process import SingleProcessCollectives

    before, collectives = private_mb(), SingleProcessCollectives()
    began = time.perf_counter()
    files = find_files([folder / "data" / "*.tfrecord"], folder / "cache", collectives)
    found_s = time.perf_counter() - began
    table = open_table(files, collectives)
    opened_s = time.perf_counter() - began
    records = np.random.default_rng(0).integers(0, table.files.num_records, _LOOKUPS).tolist()
    lookups = [lambda: [table.place_of(record) for record in records]] * 2
    first_us, again_us = (1e6 * seconds(each) / _LOOKUPS for each in lookups)
    return {
        "records": table.files.num_records,
        "find_files_s": found_s,
        "open_s": opened_s,
        "memory_mb": private_mb() - before,
        "place_us": first_us,
        "place_again_us": again_us,
    }


def draw(ranks: int) -> dict[str, float]:
    """Draws the samples of a rank's step in the middle of an epoch, as a job that resumes does."""
    from hvdtrain.data.sample_plan import SamplePlan

    def first_draw() -> None:
        plan = SamplePlan(num_samples=FILES * RECORDS_PER_FILE, batch_size=BATCH, rank=ranks // 2, size=ranks)
        plan.draw(plan.steps_per_epoch // 2)

    return {"draw_ms": 1e3 * statistics.median(seconds(first_draw) for _ in range(_DRAWS))}


def scan(folder: Path) -> dict[str, float]:
    """Opens files for the first time, together with the other ranks of a job."""
    import hvdtrain
    from hvdtrain.data.record_files import find_files
    from hvdtrain.data.record_table import open_table
    from hvdtrain.distributed import runtime

    hvdtrain.init()
    collectives = runtime.collectives()
    files = find_files([folder / "data" / "*.tfrecord"], folder / "cache", collectives)
    scan_s = seconds(lambda: open_table(files, collectives))
    return {"seconds": scan_s} if collectives.rank == 0 else {}


def measure_scans(scratch: Path) -> dict[str, Any]:
    """The first scan by one rank and by two, in turn."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    found: dict[str, list[float]] = {"1": [], "2": []}
    try:
        (folder / "data").mkdir()
        for i in range(_SCANNED_FILES):
            (folder / "data" / f"{i:05}.tfrecord").write_bytes(framed_record() * RECORDS_PER_FILE)
        for _ in range(3):
            for ranks, values in found.items():
                line = ["mpirun", "--allow-run-as-root", "-np", ranks, sys.executable, __file__, "--scan", str(folder)]
                output = subprocess.run(line, capture_output=True, text=True, check=True).stdout
                values += [json.loads(each)["seconds"] for each in output.splitlines() if "seconds" in each]
                shutil.rmtree(folder / "cache")
    finally:
        shutil.rmtree(folder)
    ratios = [one / two for one, two in zip(*found.values(), strict=True)]
    return {"seconds_by_ranks": found, "one_over_two": statistics.median(ratios), "range": [min(ratios), max(ratios)]}


def permute(samples: int) -> dict[str, float]:
    """A permutation in memory, as it was before; in a process of its own."""
    before = private_mb()
    orders = []
    took_s = seconds(lambda: orders.append(np.random.Generator(np.random.Philox([0, 0])).permutation(samples)))
    return {"seconds": took_s, "memory_mb": private_mb() - before}


def measured(*arguments: Any) -> dict[str, float]:
    line = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def measure_files(scratch: Path) -> dict[str, Any]:
    """What needs the files, which are removed again."""
    from hvdtrain.data.record_files import find_files
    from hvdtrain.data.record_index import index_records
    from hvdtrain.distributed.single_process import SingleProcessCollectives

    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        write_files(folder / "data")
        files = find_files([folder / "data" / "*.tfrecord"], folder / "cache", SingleProcessCollectives())
        write_table(files)
        found: dict[str, Any] = {"run": {"opened": [measured("--open", folder) for _ in range(3)]}}
        scan_s = seconds(lambda: index_records(folder / "scanned.tfrecord"))
        found["run"]["scan_million_records_s"] = scan_s
        found["predicted"] = {"scan_billion_records_s": 1000 * scan_s}
        found["run"]["permutation"] = {str(n): measured("--permute", n) for n in (10**7, 10**8)}
        largest = found["run"]["permutation"][str(10**8)]
        found["predicted"]["permutation_of_a_billion"] = {name: 10 * value for name, value in largest.items()}
    finally:
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--permute", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--orders", action="store_true", help="measure only the order of samples")
    parser.add_argument("--scans", action="store_true", help="measure only the first scan of files")
    parser.add_argument("--scan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    for part, argument in (
        (open_data, options.open),
        (permute, options.permute),
        (draw, options.draw),
        (scan, options.scan),
    ):
        if argument:
            print(json.dumps(part(argument)))
            return
    kept = HERE / "results" / "input_at_scale.json"
    all_parts = not (options.orders or options.scans)
    found: dict[str, Any] = measure_files(options.folder) if all_parts else json.loads(kept.read_text())
    if all_parts or options.orders:
        found["run"]["orders_by_ranks"] = {str(ranks): measured("--draw", ranks) for ranks in RANKS}
    if all_parts or options.scans:
        found["run"]["first_scan_of_a_million_records"] = measure_scans(options.folder)
    print(json.dumps(found, indent=1))
    kept.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
