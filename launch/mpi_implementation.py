"""Which MPI an mpirun belongs to."""

import re
import subprocess


def of_program(mpirun: str) -> tuple[str, int]:
    """The MPI of an mpirun, and its major version.

    Raises:
        ValueError: the MPI is unknown.
    """
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return parse(said.stdout + said.stderr)


def parse(version: str) -> tuple[str, int]:
    """The MPI and its major version, parsed from the output of ``mpirun --version``.

    Raises:
        ValueError: the MPI is unknown.
    """
    for name, pattern in (
        ("Open MPI", r"\(Open MPI\) (\d+)\."),
        ("Open MPI", r"\(PRRTE\) (\d+)\."),
        ("Intel MPI", r"Intel\(R\) MPI Library .*Version (\d+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\d+)\."),
    ):
        if match := re.search(pattern, version):
            # Open MPI 5's launcher reports the version of its runtime, PRRTE, which is 3 or later.
            return name, max(5, int(match[1])) if "PRRTE" in pattern else int(match[1])
    raise ValueError("mpirun must be Open MPI's (4 or 5), MPICH's or Intel MPI's. Received: " + version.strip()[:200])
