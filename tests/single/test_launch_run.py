"""launch/run with a fake uv, so that nothing is built."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Creates what the real uv creates and logs its calls. Installing blocks on the named pipe UV_WAITS_FOR, if set.
FAKE_UV = """#!/bin/sh
[ "$2" = list ] && { echo '[{"name": "numpy", "version": "2.0"}]'; exit; }
echo "$*" >> "$UV_CALLS"
case $1 in
    venv) mkdir -p "$6/bin" && ln -sf "$5" "$6/bin/python" ;;
    pip) [ -z "$UV_WAITS_FOR" ] || read -r _ < "$UV_WAITS_FOR"
        [ -z "$UV_FAILS_WITH" ] || { echo "$UV_FAILS_WITH"; exit 2; } ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what launch/run needs, in a folder with a space in its name."""
    folder = tmp_path / "a check out"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / ".venvs").mkdir()
    (folder / ".venvs" / "settings.json").write_text("{}")  # this machine may have a GPU
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uv").write_text(FAKE_UV)
    (tools / "uv").chmod(0o755)
    return folder


LEFT_OUT = ("HVDTRAIN", "VIRTUAL_ENV", "OMPI_ALLOW", "PYTHONHASHSEED")


def environment(checkout: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    env["PATH"] = f"{checkout.parent / 'tools'}{os.pathsep}{env['PATH']}"
    env["UV_CALLS"] = str(checkout.parent / "calls")
    env["UV_FAILS_WITH"] = env["UV_WAITS_FOR"] = ""
    env["HVDTRAIN_PYTHON"] = sys.executable
    env["XDG_CACHE_HOME"] = str(checkout.parent / "cache")  # No Horovod is kept there.
    return {**env, **more}


def run(checkout: Path, *command: str, script: Path | None = None, stdin: str = "", **more: str):
    return subprocess.run(
        [str(script or checkout / "launch" / "run"), *command],
        env=environment(checkout, **more),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


def uv_commands(checkout: Path) -> list[str]:
    path = checkout.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def calls(checkout: Path) -> list[str]:
    return [command.split()[0] for command in uv_commands(checkout)]


def start(checkout: Path, *command: str, stdin: int | None = None, **more: str) -> subprocess.Popen:
    """Starts launch/run; the caller has to wait for it."""
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [str(checkout / "launch" / "run"), *command], env=environment(checkout, **more), text=True, **pipes
    )


@pytest.fixture
def blocked_install(checkout) -> Path:
    """A named pipe for UV_WAITS_FOR."""
    pipe = checkout.parent / "pipe"
    os.mkfifo(pipe)
    return pipe


def wait_until_installing(checkout: Path, process: subprocess.Popen) -> None:
    while calls(checkout) != ["venv", "pip"]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_creates_the_environment_once_and_runs_the_command_in_it(checkout):
    first = run(
        checkout, "python", "-c", "import sys; print(sys.stdin.read(), sys.argv[1]); sys.exit(7)", "a b", stdin="in"
    )
    assert first.returncode == 7
    assert first.stdout == "in a b\n"
    assert "the environment is ready" in first.stderr
    second = run(checkout, "sh", "-c", "echo $VIRTUAL_ENV; command -v python")
    assert second.stderr == ""
    venv = (checkout / ".venv").resolve()
    assert second.stdout.splitlines() == [str(venv), str(venv / "bin" / "python")]
    assert calls(checkout) == ["venv", "pip"]


@pytest.mark.parametrize("change", ["file", "setting"])
def test_recreates_the_environment_when_its_inputs_change(checkout, change):
    assert run(checkout, "true").returncode == 0
    more = {}
    if change == "file":
        pins = checkout / "pyproject.toml"
        pins.write_text(pins.read_text().replace('"numpy>=1.26,<3"', '"numpy>=1.26.1,<3"'))
    else:
        more = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert run(checkout, "true", **more).returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2
    # A setting stays in effect without being repeated.
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2


def use_version(checkout: Path, version: str) -> None:
    pins = checkout / "pyproject.toml"
    pins.write_text(re.sub(r'"numpy>=[^"]*"', f'"numpy>={version}"', pins.read_text()))


def venvs(checkout: Path) -> set[Path]:
    return {each for each in (checkout / ".venvs").iterdir() if each.is_dir()}


def test_a_failed_update_leaves_the_environment_and_the_jobs_in_it_alone(checkout):
    assert run(checkout, "true").returncode == 0
    before = (checkout / ".venv").resolve()
    text = (checkout / "pyproject.toml").read_text()
    use_version(checkout, "1.27")
    failed = run(checkout, "true", UV_FAILS_WITH="error: Failed to fetch: dns error")
    assert failed.returncode == 1
    assert "run launch/run true on the login node first" in failed.stderr
    assert (checkout / ".venv").resolve() == before
    (checkout / "pyproject.toml").write_text(text)
    assert run(checkout, "sh", "-c", "echo $VIRTUAL_ENV").stdout.strip() == str(before)
    assert calls(checkout) == ["venv", "pip"] * 2


def test_environments_are_removed_when_no_command_runs_in_them(checkout):
    use_version(checkout, "1")
    job = start(checkout, "sh", "-c", "echo $VIRTUAL_ENV; read -r line", stdin=subprocess.PIPE)
    in_use = Path(job.stdout.readline().strip())
    for version in ("2", "3", "4"):
        use_version(checkout, version)
        assert run(checkout, "true").returncode == 0
    current = (checkout / ".venv").resolve()
    assert in_use in venvs(checkout)
    assert len(venvs(checkout)) == 3  # That of the job, the last one, and the current one.
    job.communicate("\n", timeout=60)
    use_version(checkout, "5")
    assert run(checkout, "true").returncode == 0
    assert venvs(checkout) == {current, (checkout / ".venv").resolve()}


def test_an_environment_in_a_plain_folder_is_replaced(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    assert run(checkout, "true").returncode == 0
    assert (checkout / ".venv").resolve() in venvs(checkout)


def test_does_not_rebuild_for_a_new_linter_rule(checkout):
    assert run(checkout, "true").returncode == 0
    with (checkout / "pyproject.toml").open("a") as file:
        file.write('\n[tool.another]\nrule = "x"\n')
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"]


def test_development_tools_are_added_when_a_command_needs_them(checkout):
    assert run(checkout, "python", "-c", "pass", "pytest.ini").returncode == 0
    assert calls(checkout) == ["venv", "pip"]
    for word in ("pytest", "tests/single", "/a/benchmarks"):
        assert run(checkout, "python", "-c", "pass", word).returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]
    first, second = uv_commands(checkout)[1:]
    assert "--editable ." in first
    assert "--group" not in first
    # Jobs may be running in the environment: nothing that is installed may change.
    assert "--group dev --requirement pyproject.toml --extra onnx --extra mlflow" in second
    assert "cuda" not in second
    assert "--constraint" in first
    assert "/launch/locked.txt" in first
    constraints = re.search(r"--constraint (\S*hvdtrain-installed\.txt)", second.replace("a check out", "A")).group(1)
    constraints = constraints.replace("/A/", "/a check out/")
    assert Path(constraints).read_text() == "numpy==2.0\n"
    pins = checkout / "pyproject.toml"
    pins.write_text(pins.read_text().replace('"hypothesis>=6.100,<7"', '"hypothesis>=6.101,<7"'))
    assert run(checkout, "true").returncode == 0
    assert run(checkout, "python", "-c", "pass", "tests").returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip", "pip"]


def test_extras_are_a_setting(checkout):
    assert run(checkout, "true").returncode == 0
    assert run(checkout, "true", HVDTRAIN_EXTRAS="mlflow,onnx").returncode == 0
    assert run(checkout, "true").stderr == ""
    first, second = (command for command in uv_commands(checkout) if command.startswith("pip"))
    assert first.endswith("--editable .[examples]")
    assert second.endswith("--editable .[examples,mlflow,onnx]")


def test_installs_from_a_folder_of_wheels_alone(checkout):
    # Needs no compiler: the folder has a wheel of Horovod.
    wheels = {"HVDTRAIN_WHEELHOUSE": "/a folder", "CXX": "no-such-compiler"}
    assert run(checkout, "true", **wheels).returncode == 0
    assert "--no-index --find-links /a folder --no-sources" in uv_commands(checkout)[1]
    # The folder does not have to be there later.
    assert run(checkout, "true").stderr == ""
    both = run(checkout, "true", HVDTRAIN_MPI="site", **wheels)
    assert both.returncode == 1
    assert "a folder of wheels has Horovod with Open MPI" in both.stderr
    assert "unset HVDTRAIN_WHEELHOUSE" in both.stderr


def test_a_kept_horovod_needs_no_compiler(checkout):
    """test_horovod_build.py tests what is kept."""
    code = (
        "import sys; sys.path.append('launch/horovod'); import backend; print(backend.kept.folder(), backend.version())"
    )
    done = run(checkout, sys.executable, "-c", f"import os; os.chdir({str(checkout)!r}); {code}")
    name, _, version = done.stdout.strip().rpartition(" ")
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / f"hvdtrain_horovod-{version}-py3-none-manylinux_2_17_x86_64.whl").touch()
    shutil.rmtree(checkout / ".venvs")
    assert run(checkout, "true", CXX="no-such-compiler").returncode == 0


def test_mpi4py_is_built_with_the_site_mpi(checkout):
    assert run(checkout, "true", HVDTRAIN_MPI="site").returncode == 0
    assert calls(checkout) == ["venv", "pip", "pip"]


def test_mpirun_may_be_used_by_root(checkout):
    show = "echo $OMPI_ALLOW_RUN_AS_ROOT $OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"
    assert run(checkout, "sh", "-c", show).stdout.strip() == ("1 1" if os.geteuid() == 0 else "")


def test_sets_have_the_same_order_on_all_ranks(checkout):
    show = ("sh", "-c", "echo $PYTHONHASHSEED")
    assert run(checkout, *show).stdout == "0\n"
    assert run(checkout, *show, PYTHONHASHSEED="7").stdout == "7\n"


def test_mpirun_needs_no_ssh_on_one_host(checkout):
    assert run(checkout, "true").returncode == 0
    few = checkout.parent / "few"
    few.mkdir()
    for tool in ("sh", "dirname", "readlink"):
        (few / tool).symlink_to(shutil.which(tool))
    show = ("sh", "-c", "echo ${OMPI_MCA_plm_rsh_agent:-unset}")
    assert run(checkout, *show, PATH=str(few)).stdout == "/bin/false\n"
    (few / "ssh").touch(mode=0o755)
    assert run(checkout, *show, PATH=str(few)).stdout == "unset\n"


def test_a_machine_with_a_gpu_gets_cuda_once(checkout):
    driver, bootstrap = checkout.parent / "driver", checkout / "launch" / "bootstrap.py"
    bootstrap.write_text(bootstrap.read_text().replace("/proc/driver/nvidia/version", str(driver)))
    driver.touch()
    (checkout / ".venvs" / "settings.json").unlink()
    show = ("sh", "-c", "command -v nvcc || ls /usr/local/cuda/bin/nvcc")
    assert run(checkout, "true").returncode == 0
    assert "--editable .[examples,cuda]" in uv_commands(checkout)[-1]
    has_toolkit = subprocess.run(show, capture_output=True, check=False).returncode == 0
    settings = json.loads((checkout / ".venvs" / "settings.json").read_text())
    assert settings["HOROVOD_GPU_OPERATIONS"] == ("NCCL" if has_toolkit else "")
    assert run(checkout, "true", HVDTRAIN_EXTRAS="none").returncode == 0
    assert "--editable .[examples] " in f"{uv_commands(checkout)[-1]} "
    # From a folder of wheels, if it has them.
    wheels = checkout.parent / "wheels"
    wheels.mkdir()
    for name, expected in (
        ("numpy-2.0.whl", "[examples]"),
        ("nvidia_cudnn_cu12-9.whl", "[examples,cuda]"),
    ):
        (wheels / name).touch()
        shutil.rmtree(checkout / ".venvs")
        assert run(checkout, "true", HVDTRAIN_WHEELHOUSE=str(wheels)).returncode == 0
        assert f"--editable .{expected} " in f"{uv_commands(checkout)[-1]} "
    # A node of the same cluster without a GPU uses the same environment.
    driver.unlink()
    num_calls = len(calls(checkout))
    assert run(checkout, "true").stderr == ""
    assert len(calls(checkout)) == num_calls


def test_works_through_symlinks(checkout):
    links = checkout.parent / "links"
    links.mkdir()
    (links / "one").symlink_to(checkout / "launch" / "run")
    (links / "two").symlink_to("one")
    done = run(checkout, "sh", "-c", "echo $VIRTUAL_ENV", script=links / "two")
    assert done.stdout.strip() == str((checkout / ".venv").resolve())


def test_concurrent_calls_build_once(checkout, blocked_install):
    first = start(checkout, "sh", "-c", "echo done", UV_WAITS_FOR=str(blocked_install))
    wait_until_installing(checkout, first)
    second = start(checkout, "sh", "-c", "echo done")
    assert "waiting for it" in second.stderr.readline()
    blocked_install.write_text("go\n")
    outputs = [each.communicate(timeout=60)[0] for each in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert outputs == ["done\n", "done\n"]
    assert calls(checkout) == ["venv", "pip"]


def test_failed_set_up_is_retried(checkout):
    failed = run(checkout, "echo", "never", UV_FAILS_WITH="boom: no such thing", HOROVOD_GPU_OPERATIONS="NCCL")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "boom: no such thing" in failed.stderr
    assert "the set-up failed" in failed.stderr
    assert run(checkout, "echo", "now").stdout == "now\n"
    # Created with the setting of the first try: repeating it changes nothing.
    assert run(checkout, "true", HOROVOD_GPU_OPERATIONS="NCCL").stderr == ""


@pytest.mark.parametrize(
    ("uv_says", "message"),
    [
        (
            "error: Failed to fetch: `the index`: dns error: failed to lookup address",
            "package index could not be reached",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("error sending request: client error: invalid peer certificate: UnknownIssuer", "SSL_CERT_FILE=/path"),
    ],
)
def test_failure_message_names_cause_and_remedy(checkout, uv_says, message):
    failed = run(checkout, "true", UV_FAILS_WITH=uv_says)
    assert failed.returncode == 1
    assert message in failed.stderr


def test_missing_compiler_is_reported_before_installing(checkout):
    failed = run(checkout, "true", CXX="no-such-compiler")
    assert failed.returncode == 1
    assert "needs a C++ compiler, not found (CXX=no-such-compiler)" in failed.stderr
    assert "apt install g++ make" in failed.stderr
    assert calls(checkout) == []


def test_insufficient_disk_space_is_reported(checkout):
    installation = checkout / "launch" / "installation.py"
    installation.write_text(installation.read_text().replace("NEEDED_DISK_GB = 5", "NEEDED_DISK_GB = 10**9"))
    failed = run(checkout, "true")
    assert failed.returncode == 1
    assert "GB of disk. Free in" in failed.stderr
    assert calls(checkout) == []


def test_missing_python_is_reported(checkout):
    wrong = run(checkout, "true", HVDTRAIN_PYTHON="/bin/false")
    assert wrong.returncode == 1
    assert "HVDTRAIN_PYTHON must be Python 3.10 to 3.13" in wrong.stderr
    shell_only = checkout.parent / "shell"
    shell_only.mkdir()
    for tool in ("sh", "dirname", "readlink"):
        (shell_only / tool).symlink_to(shutil.which(tool))
    none = run(checkout, "true", HVDTRAIN_PYTHON="", PATH=str(shell_only))
    assert none.returncode == 1
    assert "no Python 3.10 to 3.13 on PATH" in none.stderr


@pytest.mark.parametrize(
    ("command", "code", "message"), [((), 1, "a command is missing"), (("nope",), 127, "not found: nope")]
)
def test_invalid_commands(checkout, command, code, message):
    done = run(checkout, *command)
    assert done.returncode == code
    assert message in done.stderr


def test_restarts(checkout):
    """test_restarts.py covers the details."""
    code = "import os, sys; print(os.environ['HVDTRAIN_RESTART'], sys.argv[1:]); sys.exit(7)"
    command = ("--restarts", "1", "--restart-pause=0", "python", "-c", code, "--restarts", "a b")
    done = run(checkout, *command)
    assert done.returncode == 7
    assert done.stdout == "0 ['--restarts', 'a b']\n1 ['--restarts', 'a b']\n"
    assert "launch/run: the job ended with exit code 7; start 2 of at most 2 in 0 s." in done.stderr
    assert calls(checkout) == ["venv", "pip"]


def test_invalid_restarts_are_reported_before_installing(checkout):
    done = run(checkout, "--restarts", "true")
    assert done.returncode == 1
    assert "--restarts must be a whole number, at least 0. Received: true." in done.stderr
    assert "For example: launch/run --restarts 3" in done.stderr
    assert calls(checkout) == []


def test_signals_reach_the_command(checkout):
    assert run(checkout, "true").returncode == 0
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))\n"
        "print('up', flush=True)\n"
        "signal.pause()"
    )
    process = start(checkout, "python", "-c", code)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 33


STRUCK_WHILE_IT_STARTS = """
import os, signal, subprocess, sys
import installation

class Struck(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Struck
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
installation.run_step("Installing", ["sleep", "60"], open(os.devnull, "w"))
"""


def test_sigterm_while_the_installer_starts():
    done = subprocess.run(
        [sys.executable, "-c", STRUCK_WHILE_IT_STARTS], cwd=ROOT / "launch", capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 128 + signal.SIGTERM
    installer = Path(f"/proc/{done.stdout.split()[0]}/stat")
    until_s = time.monotonic() + 5
    while installer.exists() and installer.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_sigterm_during_set_up_also_ends_the_installer(checkout, blocked_install):
    process = start(checkout, "true", UV_WAITS_FOR=str(blocked_install))
    wait_until_installing(checkout, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert run(checkout, "true").returncode == 0
    assert calls(checkout) == ["venv", "pip"] * 2
