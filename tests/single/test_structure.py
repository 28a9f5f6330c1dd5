"""The house rules: the order of the packages, where Keras is entered, and what importing the package costs."""

import ast
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.optim.pipeline import GradientPipeline

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_packages_import_one_way_and_without_circles():
    """The contracts are in pyproject.toml, under tool.importlinter."""
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "Contracts: 3 kept, 0 broken." in done.stdout


def test_few_modules_are_at_the_top():
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == ["__init__", "__main__", "errors"]


def test_only_one_module_reads_the_environment():
    readers = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    }
    assert readers == {"system.environment"}


def test_keras_is_entered_in_one_module():
    """Methods of Keras' objects are replaced where the pipeline is called, or where an optimizer is sharded."""
    replaced = {"apply", "scale_loss", "update_state", "update_step", "check_finite"}
    places = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr in replaced
    }
    assert places == {"optim.keras_calls", "optim.distributed_optimizer"}
    called = {"MOMENTS", "COMPUTE_LOSS", "ADDITIONAL_LOSS", "CLIP", "DECAY", "UPDATE", "AVERAGE"}
    places = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "set" and isinstance(node.value, ast.Attribute)
        if node.value.attr in called
    }
    assert places == {"optim.keras_calls"}
    assert not [path for path in PACKAGE.rglob("*.py") if '"_hvdtrain_' in path.read_text()]


def test_nothing_writes_into_a_pipeline():
    """Another stage is another pipeline, made by dataclasses.replace; its classes are frozen."""
    stages = {field.name for field in dataclasses.fields(GradientPipeline)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        GradientPipeline.__new__(GradientPipeline).reduce = None
    places = {
        (name, ast.unparse(target))
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr in stages and "pipeline" in ast.unparse(target.value)
    }
    assert places == set()


def test_the_loop_calls_no_collective():
    """The trainer owns the order of operations; the modules that it calls communicate."""
    (protocol,) = (
        node
        for node in modules()["distributed.collectives"].body
        if isinstance(node, ast.ClassDef) and node.name == "Collectives"
    )
    collective_operations = {
        each.name for each in protocol.body if isinstance(each, ast.FunctionDef) and not each.decorator_list
    }
    assert {"sum", "allgather", "broadcast", "barrier", "gather_rows"} <= collective_operations
    calls = {
        node.func.attr
        for node in ast.walk(modules()["training.trainer"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not calls & collective_operations


@pytest.mark.slow
def test_a_synchronous_step_runs_through_few_files():
    here = Path(__file__).parent
    script = here / "files_of_a_step.py"
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": f"{here.parent}:{PACKAGE.parent}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {
        "training/trainer.py",
        "training/strategies/sync.py",
        "training/train_step.py",
        # A stop request is checked, and a heartbeat sent.
        "fault_tolerance/job_watch.py",
        "fault_tolerance/stop_consensus.py",
    }


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_importing_the_package_loads_neither_tensorflow_nor_mpi():
    heavy = ("tensorflow", "keras", "horovod", "mpi4py")
    output = run(f"import hvdtrain, sys; print([name for name in {heavy} if name in sys.modules])")
    assert output.strip() == "[]"


def test_the_control_plane_of_elastic_jobs_loads_no_tensorflow():
    """Its coordinator runs on any machine, and a member follows it while its main thread compiles."""
    output = run(
        "import importlib, pkgutil, sys, hvdtrain.fault_tolerance.elastic as package\n"
        "names = [each.name for each in pkgutil.iter_modules(package.__path__, f'{package.__name__}.')]\n"
        "print(len([importlib.import_module(name) for name in names]) > 5, 'tensorflow' in sys.modules)"
    )
    assert output.split() == ["True", "False"]


START_UP = """
import hvdtrain
hvdtrain.DistributedOptimizer
from tensorflow.python.eager import context
print(context.context()._initialized, hvdtrain.init().size)
"""


def test_start_up_prints_nothing():
    """TensorFlow prints a dozen lines when it starts; a user of one rank sees none of them.

    Imports create no variable: threads and devices can no longer be chosen then.
    """
    assert run(START_UP).strip() == "False 1"


PUBLIC_NAMES = """
import hvdtrain
print(set(hvdtrain.__all__) <= set(dir(hvdtrain)))
print(all(getattr(hvdtrain, name) is not None for name in hvdtrain.__all__))
"""


def test_public_names_exist_and_are_completed():
    assert run(PUBLIC_NAMES).split() == ["True", "True"]
