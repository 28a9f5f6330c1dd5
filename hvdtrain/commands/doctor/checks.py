"""Checks of one host, each with a remedy."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hvdtrain.commands.tables import aligned
from hvdtrain.errors import UsageError
from hvdtrain.system import (
    cores,
    cuda_libraries,
    devices,
    environment,
    error_text,
    local_job,
    nvidia,
    tensorflow_start,
    versions,
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the table."""

    topic: str
    state: str
    remedy: str | None = None
    """How to fix it; None if nothing is wrong."""


def table(findings: Sequence[Finding]) -> str:
    """Formats the findings as aligned rows, followed by the remedies."""
    lines = aligned([("WRONG" if each.remedy else "ok   ", each.topic, each.state) for each in findings], num_left=3)
    remedies = [f"{finding.topic}: {finding.remedy}" for finding in findings if finding.remedy]
    lines.append("A job can run here." if not remedies else "To fix: " + "\n        ".join(remedies))
    return "\n".join(lines)


def checked(topic: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Runs a check; an exception becomes a finding."""
    try:
        return check()
    except Exception as error:
        return [Finding(topic, error_text.class_and_message(error), versions.rebuilt())]


def find_versions() -> list[Finding]:
    """Compares Python and packages with the versions that hvdtrain requires."""
    required = {"python": SpecifierSet(importlib.metadata.metadata("hvdtrain")["Requires-Python"])}
    for text in importlib.metadata.requires("hvdtrain") or []:
        requirement = Requirement(text)
        required[requirement.name] = requirement.specifier
    findings = []
    for name, version in versions.versions().items():
        fits = version in required.get(name, SpecifierSet())
        findings.append(Finding(name, version, None if fits else f"hvdtrain needs {name}{required[name]}"))
    return findings


def find_keras_internals() -> list[Finding]:
    """Checks that Keras has the undocumented names that hvdtrain uses, and calls what hvdtrain replaces."""
    tensorflow_start.import_tensorflow()
    from hvdtrain.seams import check, keras_internals

    num_names = len(keras_internals.SEAMS) + len(keras_internals.IMPORTED_SEAMS)
    try:
        check.require_known_keras()
    except UsageError as error:
        return [Finding("Keras internals", "changed", str(error))]
    return [Finding("Keras internals", f"all {num_names} that hvdtrain uses are there")]


def find_horovod() -> list[Finding]:
    """Checks how Horovod was built, and for which TensorFlow."""
    tensorflow_start.import_tensorflow()
    import tensorflow as tf

    from hvdtrain.distributed import horovod

    built = ", ".join(f"{name} {'yes' if is_built else 'no'}" for name, is_built in horovod.build_facts().items())
    findings = [
        Finding("Horovod built with", built, None if "MPI yes" in built or "Gloo yes" in built else versions.rebuilt())
    ]
    built_for = versions.horovod_built_for()
    fits = built_for in (None, tf.__version__)
    remedy = None if fits else f"TensorFlow here is {tf.__version__}: {versions.rebuilt()}"
    findings.append(Finding("Horovod built for", f"TensorFlow {built_for or 'unknown'}", remedy))
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    findings += find_gpus(num_gpus, nvidia.hardware(), has_nccl="NCCL yes" in built)
    return [*findings, *find_onednn(num_gpus, is_used=devices.uses_onednn())]


def find_onednn(num_gpus: int, *, is_used: bool) -> list[Finding]:
    """Names the setting of TensorFlow that shortens steps on CPUs, where TensorFlow does not choose it by itself."""
    if num_gpus or is_used:
        return []
    state = (
        "not used on this processor. With TF_ENABLE_ONEDNN_OPTS=1, steps with convolutions took 0.57 times as long; "
        "some programs abort with it"
    )
    return [Finding("oneDNN", state)]


def find_gpus(num_gpus: int, hardware: nvidia.Hardware, *, has_nccl: bool) -> list[Finding]:
    """Compares the GPUs that TensorFlow sees with those of this host, and reports how gradients travel between them."""
    if num_gpus:
        path = "reduced on the GPU, by NCCL"
        if not has_nccl:
            path = (
                "copied to the host, reduced there and copied back, which took 35 ms for 100 MB on an H100 with one "
                "rank. HOROVOD_GPU_OPERATIONS=NCCL launch/run … builds Horovod with NCCL, which reduces them on the GPU"
            )
        return [Finding("GPUs", str(num_gpus)), Finding("gradients", path)]
    if not hardware.names:
        return [Finding("GPUs", "0")]
    state = f"TensorFlow sees none of {len(hardware.names)}: {', '.join(hardware.names)}"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not hardware.has_driver:
        remedy = "install NVIDIA's driver, or pass the GPUs to this container (docker run --gpus all)"
    elif visible is not None and local_job.num_visible(visible) == 0:
        remedy = f"unset CUDA_VISIBLE_DEVICES, which is {visible!r} and hides them"
    elif errors := cuda_libraries.errors_of_opening(tensorflow_start.library()):
        reason = next(iter(errors.values()))
        remedy = (
            f"TensorFlow cannot open {', '.join(errors)} ({reason}). HVDTRAIN_EXTRAS=cuda launch/run … installs CUDA's "
            "libraries (1.5 GB)"
        )
    else:
        remedy = "see why: python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\""
    return [Finding("GPUs", state, remedy)]


def find_mpirun() -> Finding:
    """Checks that there is an mpirun."""
    path = shutil.which("mpirun")
    if path is None:
        return Finding("mpirun", "not on PATH", "start with launch/run, or load the site's MPI module")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    first = (answer.stdout or answer.stderr).strip().splitlines()[0]
    return Finding("mpirun", f"{first}, {path}")


def try_allreduce() -> list[Finding]:
    """Starts Horovod as a job would, runs an allreduce and shows the settings that affect performance."""
    tensorflow_start.import_tensorflow()
    from hvdtrain.distributed import runtime

    topology = runtime.init()
    collectives = runtime.current().collectives
    values = [np.ones(1 << 18, np.float32)]
    collectives.sum(values)
    began_s = time.perf_counter()
    (total,) = collectives.sum(values)
    took_ms = 1000 * (time.perf_counter() - began_s)
    correct = bool(np.all(total == topology.size))
    settings = ", ".join(f"{name}={value}" for name, value in environment.performance_settings().items())
    return [
        Finding(
            "cores",
            f"{cores.usable_cores()} usable, threads per rank: {topology.threads}, local ranks: {topology.local_size}",
        ),
        Finding("settings", settings),
        Finding(
            "allreduce",
            f"1 MiB on {topology.size} rank(s): {'correct' if correct else 'WRONG SUM'}, {took_ms:.2f} ms",
            None if correct else "Horovod was built with another MPI: see launch/horovod",
        ),
    ]
