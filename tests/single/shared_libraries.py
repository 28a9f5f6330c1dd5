"""Small shared libraries that stand for those of CUDA and MPI."""

import subprocess
from pathlib import Path


def make_library(path: Path, source: str = "int unused;", *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-o", str(path), f"-Wl,-soname,{path.name}", "-x", "c", "-", "-x", "none"]
    subprocess.run([*command, *options], input=source, text=True, check=True)
    return path
