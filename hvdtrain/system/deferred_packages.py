"""Packages of Keras that few programs use, and that are imported when something uses them.

They import scikit-learn and Matplotlib, which take a third as long as TensorFlow and Keras themselves.
``importlib.util.LazyLoader`` would import them at any access, such as that of ``inspect``, which looks for the file of
each module when a function is traced.
"""

import importlib.machinery
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder

from hvdtrain.seams import keras_internals


@contextmanager
def deferred_packages() -> Iterator[None]:
    """In the block, importing Keras does not import these packages."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in keras_internals.DEFERRED_PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferring(spec.loader)
        return spec


class _Deferring(Loader):
    """Makes a package whose code runs at the first use of something that it defines."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _DeferredPackage(spec.name, self._loader)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leaves it to the package."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader


class _DeferredPackage(types.ModuleType):
    _lock = threading.RLock()

    def __init__(self, name: str, loader: Loader):
        super().__init__(name)
        self._loader: Loader | None = loader

    def __getattr__(self, name: str) -> object:
        # Called for what the package lacks so far. A search for a __file__ is no use.
        if not name.startswith("__") or name == "__all__":
            self._execute()
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        self._execute()
        return sorted(vars(self))

    def _execute(self) -> None:
        with self._lock:
            loader, self._loader = self._loader, None
            if loader is not None:
                loader.exec_module(self)
