"""Builds the distributions of hvdtrain, and collects the wheels that an installation without internet needs.

Called by ``launch/build`` and ``launch/wheelhouse``.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from bootstrap import export, settings
from installation import LOG, ROOT, fail, find_uv, mpi_to_install

# The checkout is installed with these, where the folder of wheels is all there is.
TO_INSTALL_A_CHECKOUT = ("uv", "hatchling>=1.27,<2", "editables")


def build(folder: Path, uv: list[str]) -> None:
    """Builds source archives and wheels of hvdtrain and hvdtrain-horovod."""
    for project in (ROOT, ROOT / "launch" / "horovod"):
        options = ["--quiet", "--no-create-gitignore", "--python", sys.executable]
        # A wheel that is built from a source archive could not name the TensorFlow and the MPI that it is for.
        for kind in ("--sdist", "--wheel"):
            run([*uv, "build", kind, *options, "--out-dir", str(folder), str(project)])


def download(folder: Path, uv: list[str], options: list[str], *, with_cuda: bool) -> None:
    """Downloads all that hvdtrain, its extras and its tests require beside what was built."""
    (hvdtrain,) = folder.glob("hvdtrain-*.whl")
    with zipfile.ZipFile(hvdtrain) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.+)$", wheel.read(metadata).decode(), re.MULTILINE)
    if not with_cuda:
        extras.remove("cuda")
    pip = [
        *uv,
        "run",
        "--quiet",
        "--no-project",
        "--python",
        sys.executable,
        "--with",
        "pip>=25.1",
        "python",
        "-m",
        "pip",
    ]
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:", *options]
    command += ["--dest", str(folder), "--find-links", str(folder), "--group", f"{ROOT / 'pyproject.toml'}:dev"]
    run([*command, f"{hvdtrain}[{','.join(extras)}]", *mpi_to_install(), *TO_INSTALL_A_CHECKOUT])


def run(command: list[str]) -> None:
    code = subprocess.run(command).returncode
    if code != 0:
        fail(f"{' '.join(command[:4])} … failed with exit code {code}.", "Fix the reported problem and run it again.")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"launch/{arguments[0]}", description=DESCRIPTIONS[arguments[0]])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="created if it is missing")
    parser.add_argument("--cuda", action="store_true", help="with CUDA's libraries, for GPUs (wheelhouse only)")
    known, options = parser.parse_known_args(arguments[1:])
    if options and arguments[0] == "build":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    known.folder.mkdir(parents=True, exist_ok=True)
    # Those that the environment was made with decide which Horovod is built.
    export(settings())
    with LOG.open("w") as log:
        uv = find_uv(log)
    build(known.folder, uv)
    if arguments[0] == "wheelhouse":
        download(known.folder, uv, options, with_cuda=known.cuda)
    megabytes = sum(path.stat().st_size for path in known.folder.iterdir()) / 1e6
    print(f"{known.folder}: {len(list(known.folder.iterdir()))} files, {megabytes:.0f} MB")


DESCRIPTIONS = {
    "build": "Builds the source archives and wheels that are published: hvdtrain and hvdtrain-horovod.",
    "wheelhouse": "Makes a folder of all wheels that machines without internet need: there, pip install --no-index "
    "--find-links FOLDER hvdtrain, or HVDTRAIN_WHEELHOUSE=FOLDER launch/run … in a checkout. Further options go to "
    "pip download; for another Python: --python-version 3.12.",
}

if __name__ == "__main__":
    main(sys.argv[1:])
