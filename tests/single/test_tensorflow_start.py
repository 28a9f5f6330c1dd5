"""How TensorFlow is imported."""

import gc
import inspect
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.seams import keras_internals
from hvdtrain.system import tensorflow_start
from hvdtrain.system.deferred_packages import deferred_packages


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_waits_for_the_import_and_leaves_it_alone(was_enabled, monkeypatch):
    seen = []
    monkeypatch.delitem(tensorflow_start.sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(tensorflow_start.cuda_libraries, "preload", lambda: None)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "tensorflow":
                seen.append(gc.isenabled())
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(tensorflow_start.sys, "meta_path", [Finder, *tensorflow_start.sys.meta_path])
    frozen = gc.get_freeze_count()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ModuleNotFoundError):
            tensorflow_start.import_tensorflow()
        assert seen == [False]
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()
        gc.unfreeze()


EXTRAS = """
loaded = True
def plot():
    return "a plot"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Imports a package whose part ``extras`` is deferred."""
    (tmp_path / "deferring" / "extras").mkdir(parents=True)
    (tmp_path / "deferring" / "__init__.py").write_text("from deferring import extras as extras\n")
    (tmp_path / "deferring" / "extras" / "__init__.py").write_text(EXTRAS)
    (tmp_path / "deferring" / "extras" / "part.py").write_text("from deferring.extras import plot\n")
    monkeypatch.setattr(keras_internals, "DEFERRED_PACKAGES", ("deferring.extras",))
    monkeypatch.syspath_prepend(tmp_path)
    with deferred_packages():
        import deferring
    yield deferring
    for name in [each for each in sys.modules if each.partition(".")[0] == "deferring"]:
        del sys.modules[name]


def is_loaded(package):
    return "loaded" in vars(package.extras)


def test_a_package_is_imported_at_its_first_use(package):
    assert not is_loaded(package)
    assert inspect.getmodule(test_a_package_is_imported_at_its_first_use) is sys.modules[__name__]
    assert not hasattr(package.extras, "__wrapped__")
    assert package.extras.__file__.endswith("__init__.py")
    assert not is_loaded(package)
    assert package.extras.plot() == "a plot"
    assert is_loaded(package)
    with pytest.raises(AttributeError, match=r"module 'deferring\.extras' has no attribute 'missing'"):
        _ = package.extras.missing


@pytest.mark.parametrize(
    "use", ["from deferring.extras import *", "import deferring.extras.part", "from deferring.extras import plot"]
)
def test_a_deferred_package_can_be_imported_in_any_way(package, use):
    exec(use, {})
    assert is_loaded(package)


def test_a_deferred_package_lists_what_it_has(package):
    assert "plot" in dir(package.extras)


def test_threads_import_it_once(package, monkeypatch):
    executed = []
    loader = package.extras.__loader__
    execute = loader.exec_module

    def execute_slowly(self, module):
        executed.append(1)
        time.sleep(0.1)  # For the other threads to come.
        execute(module)

    monkeypatch.setattr(type(loader), "exec_module", execute_slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: package.extras.plot(), range(16)))
    assert found == ["a plot"] * 16
    assert executed == [1]


@pytest.mark.slow
def test_keras_is_imported_without_what_few_programs_use():
    program = """
import sys
from hvdtrain.system import tensorflow_start
tensorflow_start.import_tensorflow()
import keras
assert not {"sklearn", "matplotlib"} & sys.modules.keys(), sys.modules.keys()
assert callable(keras.visualization.plot_image_gallery)
assert callable(keras.wrappers.SKLearnClassifier)
assert {"sklearn", "matplotlib"} < sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
