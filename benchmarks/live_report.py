"""What ten browsers that look at a live page cost the job, and how soon they see a log line.

    launch/run python benchmarks/live_report.py --pairs 15

Trains the digits on one rank, and serves the page of the run from a second process. In every other window of some
seconds, ten clients ask for new values once a second, as the page does; a window with and one without are a pair.
Prints the ratio of their steps per second, and the seconds from a log line until a client has it, each with the median
and quartiles.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

CLIENTS, POLL_EVERY_S = 10, 1.0
LOG_EVERY = 20


class Clients:
    """Ask for new values while ``active`` is set; note how old the last log line is when it first arrives."""

    def __init__(self, url: str):
        self.active = threading.Event()
        self.delays_s: list[float] = []
        for _ in range(CLIENTS):
            threading.Thread(target=self._look, args=(url,), daemon=True).start()

    def _look(self, url: str) -> None:
        version, seen_step = "", 0.0
        while True:
            self.active.wait()
            with urllib.request.urlopen(f"{url}values.json?version={version}", timeout=30) as answer:
                content = answer.read()
            if answer.status == 200:
                found = json.loads(content)
                version, steps = found["version"], found["sources"]["loss-step 0"]["x"]
                if seen_step and steps[-1] > seen_step:
                    # The oldest line that is new to this client has waited the longest.
                    self.delays_s.append(time.time() - LINE_TIMES[next(x for x in steps if x > seen_step)])
                seen_step = steps[-1]
            time.sleep(POLL_EVERY_S)
            if not self.active.is_set():
                seen_step = 0.0


LINE_TIMES: dict[float, float] = {}
"""When each step was logged."""


def read_new_lines(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open() as file:
        while True:
            line = file.readline()
            if not line.endswith("\n"):
                time.sleep(0.005)
                continue
            event = json.loads(line)
            if event["event"] == "train":
                LINE_TIMES[event["step"]] = event["time"]


def steps_per_second(begin_s: float, end_s: float) -> float:
    found = [(at, step) for step, at in LINE_TIMES.items() if begin_s <= at <= end_s]
    (first_s, first), (last_s, last) = min(found), max(found)
    return (last - first) / (last_s - first_s)


def shown(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f}; {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        words = ["--steps", "10000000", "--threads", "1", "--log-every", str(LOG_EVERY), "--run-dir", str(run_dir)]
        hvdtrain = [sys.executable, "-m", "hvdtrain"]
        job = subprocess.Popen([*hvdtrain, *words], stdout=subprocess.DEVNULL)
        while not (run_dir / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(5)  # compiles
        server = subprocess.Popen([*hvdtrain, "report", str(run_dir), "--serve"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            clients = Clients(server.stdout.readline().split()[0])
            threading.Thread(target=read_new_lines, args=(run_dir,), daemon=True).start()
            ratios = []
            for pair in range(options.pairs):
                speeds = {}
                for watched in (True, False) if pair % 2 else (False, True):
                    (clients.active.set if watched else clients.active.clear)()
                    time.sleep(POLL_EVERY_S)
                    begin_s = time.time()
                    time.sleep(options.seconds)
                    speeds[watched] = steps_per_second(begin_s, time.time())
                ratios.append(speeds[True] / speeds[False])
        finally:
            for process in (server, job):
                process.kill()
                process.wait()
    print(f"steps/s with {CLIENTS} browsers over without: {shown(ratios)}")
    print(f"seconds until a client has a log line: {shown(clients.delays_s)}, at most {max(clients.delays_s):.2f}")


if __name__ == "__main__":
    main()
