"""What hvdtrain uses of Keras' internals: named once, there, called, and reported in one line if it is not."""

import ast
import dataclasses
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

import hvdtrain
from hvdtrain.commands.doctor.checks import find_keras_internals
from hvdtrain.errors import UsageError
from hvdtrain.seams import horovod_internals, keras_internals, tensorflow_internals
from hvdtrain.seams.check import require_known_keras
from hvdtrain.seams.seam import TESTED, ImportedSeam, Seam

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdtrain"
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent.name != "seams"
}
CONSTANTS = {name: value for name, value in vars(keras_internals).items() if isinstance(value, Seam | ImportedSeam)}
# Of Python's own modules, and the method by which an fsspec file system removes its protocol from a path.
OTHERS = {"_exit", "_current_frames", "_replace", "_handle", "_strip_protocol"}

hvdtrain.init()


def test_keras_has_and_calls_what_is_used():
    require_known_keras()
    (finding,) = find_keras_internals()
    assert finding.remedy is None


def renamed(monkeypatch, constant: str, **changes: str) -> None:
    before = CONSTANTS[constant]
    after = dataclasses.replace(before, **changes)
    monkeypatch.setattr(keras_internals, constant, after)
    for seams in ("SEAMS", "IMPORTED_SEAMS"):
        known = getattr(keras_internals, seams)
        monkeypatch.setattr(keras_internals, seams, [after if each is before else each for each in known])


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_name_that_is_missing_is_reported(constant, monkeypatch):
    renamed(monkeypatch, constant, name="_of_another_version")
    with pytest.raises(UsageError, match=r"Keras must be a version .*3\.9 to .*no .*_of_another_version, which"):
        require_known_keras()
    (finding,) = find_keras_internals()
    assert "_of_another_version" in finding.remedy


@pytest.mark.parametrize(
    "constant", [name for name, seam in CONSTANTS.items() if isinstance(seam, Seam) and seam.is_called]
)
def test_a_method_that_is_not_called_is_reported(constant, monkeypatch):
    renamed(monkeypatch, constant, name="get_config")  # It exists, and no step calls it.
    with pytest.raises(UsageError, match=r"get_config, which .*, not called"):
        require_known_keras()


def test_each_internal_name_is_used_and_written_once():
    names = [value.name for value in CONSTANTS.values()]
    names += [seam.name for seam in horovod_internals.OWN_OPTIMIZER]
    names.append(tensorflow_internals.ITERATOR_RESOURCE.name)
    assert len(names) == len(set(names))
    elsewhere = [
        (place, node.value)
        for place, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    # A message tells users which method their own optimizer must call; the attribute of a variable is public.
    assert [each for each in elsewhere if each[1].startswith("_")] == []
    used = {node.attr for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [constant for constant in CONSTANTS if constant not in used] == []


def test_no_other_module_uses_internals():
    own = {
        name
        for tree in MODULES.values()
        for node in ast.walk(tree)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            else [node.id]
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else []
        )
    }
    foreign = {
        (place, node.attr)
        for place, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if node.attr not in own | OTHERS
    }
    # Names that hvdtrain's own classes happen to share with Keras'.
    shared = {value.name for value in CONSTANTS.values() if isinstance(value, Seam) and value.name in own}
    foreign |= {
        (place, node.attr)
        for place, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in shared and ast.unparse(node.value) not in ("self", "cls")
    }
    assert foreign == set()
    imported = {
        (place, node.module)
        for place, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith(("keras.src", "tensorflow.python", "tensorflow.core"))
    }
    assert imported == set()


def test_the_bounds_are_the_versions_that_were_tested():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (keras,) = (each for each in map(Requirement, dependencies) if each.name == "keras")
    oldest, newest = TESTED["keras"]
    after = Version(f"{Version(newest).major}.{Version(newest).minor + 1}")
    assert str(keras.specifier) in (f"<{after},>={oldest}", f">={oldest},<{after}")
