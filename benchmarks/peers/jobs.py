"""Concurrent jobs that take turns: while one runs, the others are stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from places import Process

Steps = dict[str, dict[str, float]]
"""Step times in ms by peer and case."""

HERE = Path(__file__).resolve().parent
_TURN_S = 300


class Job:
    """The processes of one peer. After construction, models are built and the job is stopped until its turn."""

    def __init__(self, processes: list[Process], network: str, num_turns: int):
        self._turns = tempfile.TemporaryDirectory()
        self._turn = 0
        self._errors = Path(self._turns.name, "errors").open("w+")  # noqa: SIM115
        variables = {"NETWORK": network, "NUM_TURNS": str(num_turns), "TURNS": self._turns.name}
        common = {**os.environ, **variables, "PYTHONPATH": str(HERE.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
        # On some processors, TensorFlow leaves oneDNN off.
        common["TF_ENABLE_ONEDNN_OPTS"] = "1"
        self._processes = [
            subprocess.Popen(
                command,
                env={**common, **env},
                stdout=subprocess.PIPE if i == 0 else self._errors,
                stderr=self._errors,
                text=True,
            )
            for i, (command, env) in enumerate(processes)
        ]
        try:
            self._result()
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    def turn(self) -> Steps:
        """Runs a block of every case."""
        self._signal(signal.SIGCONT)
        (Path(self._turns.name) / f"turn-{self._turn}").touch()
        self._turn += 1
        steps = self._result()
        self._signal(signal.SIGSTOP)
        return steps

    def end(self) -> None:
        """Ends the job, after the last turn or after a failure."""
        for process in self._processes:
            process.kill()
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._errors.close()
        self._turns.cleanup()

    def _signal(self, signum: signal.Signals) -> None:
        for path in Path(self._turns.name).glob("pid-*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.name.removeprefix("pid-")), signum)

    def _result(self) -> Steps:
        first = self._processes[0]
        # After a failure of one rank, the others may wait forever.
        timer = threading.Timer(_TURN_S, first.kill)
        timer.start()
        try:
            for line in first.stdout:
                if "RESULT " in line:
                    return json.loads(line.partition("RESULT ")[2])
        finally:
            timer.cancel()
        self._errors.seek(0)
        sys.exit(f"{first.args} failed, or took more than {_TURN_S} s:\n{self._errors.read()[-4000:]}")
