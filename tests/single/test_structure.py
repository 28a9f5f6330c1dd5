"""The arrows between modules, and what importing the package costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"

# Each module may import those before it.
ORDER = [
    *(
        "errors",
        "files",
        "config",
        "process",
        "supervised",
        "sampling",
        "schedule",
        "messages",
        "collectives",
        "runtime",
        "gpus",
    ),
    *(
        "failure",
        "replicas",
        "fused_update",
        "optimizer",
        "averaging",
        "batchnorm",
        "weight_average",
        "loss_scale",
        "losses",
        "timing",
    ),
    *(
        "gradient_watch",
        "data",
        "activations",
        "metrics",
        "checkpoint",
        "report",
        "run_directory",
        "xla",
        "steps",
        "callbacks",
        "evaluation",
    ),
    *("progress", "intervals", "modes", "run_state", "training_report", "tasks", "building", "trained_run", "trainer"),
    *("session", "doctor", "bench", "job", "evaluate", "export", "cli", "__main__"),
]


def modules() -> dict[str, ast.Module]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported(tree: ast.Module) -> set[str]:
    """Modules of ours that are imported, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            from_package = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= from_package if node.module == "hvdtrain" else {node.module}
    return found


def position(name: str) -> int:
    return ORDER.index(name.split(".")[0])


def test_every_module_has_its_place():
    assert {name.split(".")[0] for name in modules()} == set(ORDER)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name):
    ours = {each.removeprefix("hvdtrain.") for each in imported(modules()[name]) if each.startswith("hvdtrain.")}
    later = {each for each in ours if position(each) > position(name)}
    assert not later, f"{name} imports {later}, which stand above it"
    assert "trainer" not in ours or name in ("job", "bench.cases")


def test_only_collectives_imports_horovod_and_mpi():
    foreign = {(name, each.split(".")[0]) for name, tree in modules().items() for each in imported(tree)}
    users = {name for name, package in foreign if package in ("horovod", "mpi4py")}
    assert users == {"collectives"}


def test_only_process_reads_the_environment():
    readers = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    }
    assert readers == {"process"}


def test_the_loop_calls_no_collective():
    """The trainer owns the order of things; what ranks do together is done by the modules it calls."""
    calls = {
        node.func.attr
        for node in ast.walk(modules()["trainer"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not calls & {"allgather", "sum", "barrier", "all_true", "gradient_reducer"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_the_package_loads_neither_tensorflow_nor_mpi():
    heavy = ("tensorflow", "keras", "horovod", "mpi4py")
    output = run(f"import hvdtrain, sys; print([name for name in {heavy} if name in sys.modules])")
    assert output.strip() == "[]"


def test_starting_says_nothing_of_its_own():
    """TensorFlow prints a dozen lines on its start; a user of one rank sees none of them."""
    assert run("import hvdtrain; print(hvdtrain.init().size)").strip() == "1"


def test_public_names_exist():
    output = run("import hvdtrain; print(all(getattr(hvdtrain, name) is not None for name in hvdtrain.__all__))")
    assert output.strip() == "True"
