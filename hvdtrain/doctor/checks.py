"""What matters for a job on one host, each with a remedy where it is wrong."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hvdtrain import process

_REBUILD = "rebuild the environment: delete .venv and call launch/run again"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the table."""

    topic: str
    state: str
    remedy: str | None = None
    """What to do; None where nothing is wrong."""


def table(findings: Sequence[Finding]) -> str:
    """The findings as aligned rows, then what to do."""
    width = max(len(finding.topic) for finding in findings)
    lines = [
        f"{'WRONG' if finding.remedy else 'ok':5}  {finding.topic:{width}}  {finding.state}" for finding in findings
    ]
    remedies = [f"{finding.topic}: {finding.remedy}" for finding in findings if finding.remedy]
    lines.append("A job can run here." if not remedies else "To mend: " + "\n         ".join(remedies))
    return "\n".join(lines)


def checked(topic: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check's findings; an exception in it is a finding too."""
    try:
        return check()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Finding(topic, cause, _REBUILD)]


def find_versions() -> list[Finding]:
    """Python and the packages, each against the range that hvdtrain asks for."""
    asked = {"python": SpecifierSet(importlib.metadata.metadata("hvdtrain")["Requires-Python"])}
    for text in importlib.metadata.requires("hvdtrain") or []:
        requirement = Requirement(text)
        asked[requirement.name] = requirement.specifier
    findings = []
    for name, version in process.versions().items():
        fits = version in asked.get(name, SpecifierSet())
        findings.append(Finding(name, version, None if fits else f"hvdtrain needs {name}{asked[name]}: {_REBUILD}"))
    return findings


def find_horovod() -> list[Finding]:
    """How Horovod was built, and whether it was for this TensorFlow."""
    process.import_tensorflow()
    import tensorflow as tf

    from hvdtrain import collectives

    built = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in collectives.build_facts().items())
    findings = [Finding("Horovod built with", built, None if "MPI yes" in built or "Gloo yes" in built else _REBUILD)]
    required = [text for text in importlib.metadata.requires("horovod") or [] if text.startswith("tensorflow==")]
    expected = required[0].removeprefix("tensorflow==") if required else "unknown"
    findings.append(
        Finding(
            "Horovod built for",
            f"TensorFlow {expected}",
            None
            if expected in (tf.__version__, "unknown")
            else f"TensorFlow here is {tf.__version__}: rebuild Horovod",
        )
    )
    gpus = tf.config.list_physical_devices("GPU")
    needs_nccl = bool(gpus) and "NCCL yes" not in built
    findings.append(
        Finding(
            "GPUs",
            str(len(gpus)),
            "HOROVOD_GPU_OPERATIONS=NCCL launch/run … rebuilds Horovod with NCCL" if needs_nccl else None,
        )
    )
    return findings


def find_mpirun() -> Finding:
    """The launcher's version: Open MPI 5's mpirun cannot be driven by horovodrun."""
    path = shutil.which("mpirun")
    if path is None:
        return Finding("mpirun", "not on PATH", "call through launch/run, or load the site's MPI module")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    first = (answer.stdout or answer.stderr).strip().splitlines()[0]
    if "Open MPI) 5" in first:
        return Finding("mpirun", f"{first}, {path}", "horovodrun needs Open MPI 4; with 5 call mpirun yourself")
    return Finding("mpirun", f"{first}, {path}")


def try_allreduce() -> list[Finding]:
    """Starts Horovod as a job would, sums the ranks and shows the defaults that speed depends on."""
    process.import_tensorflow()
    from hvdtrain import runtime

    topology = runtime.init()
    collectives = runtime.current().collectives
    values = [np.ones(1 << 18, np.float32)]
    collectives.sum(values)
    began_s = time.perf_counter()
    (total,) = collectives.sum(values)
    took_ms = 1000 * (time.perf_counter() - began_s)
    right = bool(np.all(total == topology.size))
    settings = ", ".join(f"{name}={value}" for name, value in process.settings().items())
    return [
        Finding(
            "cores", f"{process.usable_cores()} usable, {topology.threads} thread(s) a rank of {topology.local_size}"
        ),
        Finding("settings", settings),
        Finding(
            "allreduce",
            f"1 MiB on {topology.size} rank(s): {'right' if right else 'WRONG SUM'}, {took_ms:.2f} ms",
            None if right else "the MPI in use is not the one Horovod was built with: see launch/horovod",
        ),
    ]
