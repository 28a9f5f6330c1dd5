"""An internal name of a library, with what hvdtrain uses it for."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from hvdtrain.errors import UsageError

TESTED = {"keras": ("3.9", "3.15"), "tensorflow": ("2.18", "2.21"), "horovod": ("0.28", "0.28")}
"""The oldest and the newest minor version with which the tests have passed."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """An attribute of objects of a library."""

    owner: str
    """The class whose objects have it."""
    name: str
    use: str
    """What hvdtrain does with it."""
    is_called: bool = False
    """Whether hvdtrain replaces it and relies on the library to call it."""
    library: str = "keras"

    def of(self, thing: Any) -> Any:
        """Its value in an object.

        Raises:
            UsageError: this version of the library has no such name.
        """
        try:
            return getattr(thing, self.name)
        except AttributeError:
            raise self.missing() from None

    def set(self, thing: Any, value: Any) -> None:
        """Replaces it in an object or a class, which must have it.

        Raises:
            UsageError: this version of the library has no such name.
        """
        self.of(thing)
        setattr(thing, self.name, value)

    def is_in(self, thing: Any) -> bool:
        """Whether an object has it; some objects have it only after they are built."""
        return hasattr(thing, self.name)

    def missing(self) -> UsageError:
        """The error if it does not exist."""
        return unsupported(self.library, f"no {self.owner}.{self.name}, which {self.use}")


@dataclasses.dataclass(frozen=True)
class ImportedSeam:
    """A function of a module that is not public."""

    module: str
    name: str
    use: str
    library: str = "keras"

    def value(self) -> Any:
        """Imports it.

        Raises:
            UsageError: this version of the library has no such name.
        """
        try:
            return getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            raise unsupported(self.library, f"no {self.module}.{self.name}, which {self.use}") from None

    def replace(self, value: Any) -> Callable[[], None]:
        """Replaces it in its module; returns what restores it.

        Raises:
            UsageError: this version of the library has no such name.
        """
        before, module = self.value(), importlib.import_module(self.module)
        setattr(module, self.name, value)
        return lambda: setattr(module, self.name, before)


def unsupported(library: str, lacks: str) -> UsageError:
    """The error for a version of a library that does not do what hvdtrain relies on."""
    oldest, newest = TESTED[library]
    known = oldest if oldest == newest else f"{oldest} to {newest}"
    title = {"keras": "Keras", "tensorflow": "TensorFlow", "horovod": "Horovod"}[library]
    # The distribution may have another name: keras-nightly, tensorflow-cpu.
    version = importlib.import_module(library).__version__
    return UsageError(
        f"{title} must be a version that hvdtrain supports: {known}. Received: {version}, with {lacks}. Install one of "
        "them."
    )
