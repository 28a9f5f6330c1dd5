"""A Slurm cluster on lab hosts: Debian's slurm-wlm and munge, started and stopped by the tests."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from laboratory import Laboratory

_CONF = """\
ClusterName=lab
SlurmctldHost=lab1
AuthType=auth/munge
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/mnt/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile=/mnt/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
SchedulerParameters=sched_interval=2
NodeName={nodes} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The prerequisites of Slurm that this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    needed = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
    return [f"{name} (Debian: {package})" for name, package in needed.items() if not shutil.which(name, path=path)]


class Slurm:
    """A controller on the first host; every host is a node with 4 CPUs.

    Args:
        folder: where to keep Slurm's state.
    """

    def __init__(self, lab: Laboratory, folder: Path):
        self._lab = lab
        self._folder = folder
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Slurm":
        self._start_munge()
        conf = self._folder / "slurm.conf"
        (self._folder / "state").mkdir()
        conf.write_text(_CONF.format(folder=self._folder, nodes=",".join(self._lab.names)))
        # The default is /tmp, which lab hosts share.
        conf.with_name("mpi.conf").write_text("PMIxCliTmpDirBase=/mnt\n")
        os.environ["SLURM_CONF"] = str(conf)
        self._start(self._lab.command("lab1", ["slurmctld", "-D", "-f", str(conf)]))
        for name in self._lab.names:
            self._lab.path(name, "/mnt/spool").mkdir()
            self._start(self._lab.command(name, ["slurmd", "-D", "-N", name, "-f", str(conf)]))
        deadline_s = time.monotonic() + 30
        while self.ask("sinfo", "-h", "-o", "%T %D") != f"idle {len(self._lab.names)}":
            assert time.monotonic() < deadline_s, (self._folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        del os.environ["SLURM_CONF"]

    def _start_munge(self) -> None:
        folder = self._folder / "munge"
        folder.mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        for path, mode in ((folder, 0o755), (key, 0o400)):
            path.chmod(mode)
        socket = Path("/run/munge/munge.socket.2")
        socket.parent.mkdir(mode=0o755, exist_ok=True)
        files = [f"--{name}={folder / name}" for name in ("log-file", "pid-file", "seed-file")]
        self._start(["munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *files])
        deadline_s = time.monotonic() + 10
        while not socket.exists():
            assert time.monotonic() < deadline_s, "munged did not start"
            time.sleep(0.1)

    def _start(self, command: list[str]) -> None:
        with (self._folder / f"{len(self._processes)}.log").open("w") as log:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def ask(self, *command: str) -> str:
        """Runs a Slurm command on the first host and returns its output."""
        done = subprocess.run(
            self._lab.command("lab1", list(command)), capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.strip() or done.stderr.strip()

    def state(self, job: str) -> str:
        """A job's state, RUNNING or COMPLETED for example."""
        shown = self.ask("scontrol", "show", "job", job)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), shown)
