"""Builds the distributions for a package index, checks them, installs them from an index on this machine, and trains.

Called by ``launch/publish``. The upload is left to a person: its command is printed at the end.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from installation import LOG, ROOT, fail, find_uv

# What checks the distributions, and what serves them.
TOOLS = ["twine>=6,<7", "check-wheel-contents>=0.6,<1", "pyroma>=5,<6", "pypiserver>=2.3,<3", "cyclonedx-bom>=7,<8"]
MIN_RATING = 9
_START_S = 20.0


def release_source(folder: Path, repository: str, contact: str) -> Path:
    """A clone whose README and metadata point to the repository: an index shows them without its other files.

    Args:
        contact: the authors' address.
    """
    source = folder / "source"
    run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)])
    readme = source / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), repository))
    project = source / "pyproject.toml"
    urls = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    lines = "".join(f'{name} = "{repository}{path}"\n' for name, path in urls.items())
    text = project.read_text().replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n")
    project.write_text(re.sub(r'(?m)^(authors = .*)" }]$', rf'\1", email = "{contact}" }}]', text))
    return source


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative links and pictures lead to files of a repository."""

    def absolute(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        return f"{mark}[{label}]({repository}/{'raw' if mark else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)


def check(folder: Path, tools: list[str]) -> None:
    """Checks metadata, the content of wheels, and what an index shows."""
    files = sorted(map(str, folder.iterdir()))
    run([*tools, "twine", "check", "--strict", *files])
    for wheel in folder.glob("*.whl"):
        # Horovod has the same file in two of its packages.
        ignored = ["--ignore", "W002"] if wheel.name.startswith("hvdtrain_horovod-") else []
        run([*tools, "check-wheel-contents", *ignored, str(wheel)])
    (archive,) = folder.glob("hvdtrain-*.tar.gz")
    rated = subprocess.run([*tools, "pyroma", "--min", str(MIN_RATING), str(archive)], capture_output=True, text=True)
    print(rated.stdout, end="")
    if rated.returncode != 0:
        fail(f"pyroma must rate the archive with at least {MIN_RATING}.", "Mend what it lists.")


def install_and_train(folder: Path, work: Path, uv: list[str], tools: list[str]) -> None:
    """Serves the distributions, installs them into an empty environment, and trains on two ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [*tools, "pypi-server", "run", "--interface", "127.0.0.1", "--port", str(port), "--disable-fallback"]
    server = subprocess.Popen([*serve, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while not answers(port):
            if time.monotonic() > until:
                fail("the index on this machine does not start.", f"Run it yourself: {' '.join(serve)} {folder}")
            time.sleep(0.2)
        environment = work / "environment"
        base = getattr(sys, "_base_executable", sys.executable)
        run([*uv, "venv", "--quiet", "--python", base, str(environment)])
        # The index of this machine comes first: nothing of that name is taken from another.
        index = ["--index", f"http://127.0.0.1:{port}/simple/"]
        run([*uv, "pip", "install", "--quiet", "--python", str(environment / "bin" / "python"), *index, "hvdtrain"])
        env = {**os.environ, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for name in ("VIRTUAL_ENV", "PYTHONPATH"):
            env.pop(name, None)
        run([str(environment / "bin" / "hvdtrain"), "test"], env=env, cwd=work)
        write_bill_of_materials(folder.with_name(f"{folder.name}.cdx.json"), environment, tools)
    finally:
        server.terminate()
        server.wait()


def write_bill_of_materials(path: Path, environment: Path, tools: list[str]) -> None:
    """Lists the packages of an installation, their versions and licenses, as a CycloneDX document."""
    options = ["--output-reproducible", "--output-format", "JSON", "--output-file", str(path)]
    run([*tools, "cyclonedx-py", "environment", *options, str(environment / "bin" / "python")])
    print(f"Bill of materials: {path}")


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_archive(folder: Path, work: Path) -> None:
    """Runs the quick tests from the unpacked source archive, which must be complete."""
    (archive,) = folder.glob("hvdtrain-*.tar.gz")
    shutil.unpack_archive(archive, work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    run([str(unpacked / "launch" / "run"), "pytest", "-q"], cwd=unpacked)


def run(command: list[str], **options: object) -> None:
    code = subprocess.run(command, **options).returncode  # type: ignore[call-overload]
    if code != 0:
        fail(
            f"{' '.join(command)} failed with exit code {code}.",
            "Nothing was uploaded. Mend it, and run this again.",
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch/publish", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the distributions; must not exist")
    parser.add_argument("--repository", required=True, metavar="URL", help="where the source is: https://…/hvdtrain")
    parser.add_argument("--contact", required=True, metavar="ADDRESS", help="the authors' e-mail address")
    parser.add_argument("--with-tests", action="store_true", help="also run the quick tests from the source archive")
    known = parser.parse_args(arguments)
    if known.folder.exists():
        parser.error(f"{known.folder} exists")
    with LOG.open("w") as log:
        uv = find_uv(log)
    tools = [*uv, "run", "--quiet", "--no-project", "--python", sys.executable]
    tools += [word for each in TOOLS for word in ("--with", each)]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-publish-") as name:
        work = Path(name)
        source = release_source(work, known.repository.rstrip("/"), known.contact)
        run([str(source / "launch" / "build"), str(known.folder.absolute())])
        check(known.folder, tools)
        install_and_train(known.folder, work, uv, tools)
        if known.with_tests:
            test_archive(known.folder, work)
    print(f"Everything is checked. To publish: twine upload {known.folder}/*")


if __name__ == "__main__":
    main(sys.argv[1:])
