"""Hides optional packages from Keras, TensorFlow and scikit-learn when these are imported.

Python imports this module at each start with this folder on PYTHONPATH: see .ci/run, which runs the slow tests this
way, and the quick ones without. A rank then starts in 2.0 s of CPU time instead of 3.3 s. All other
modules find the packages.
"""

import sys

OPTIONAL_PACKAGES = ("matplotlib", "pandas", "sklearn")


class HiddenPackages:
    """A finder that raises ModuleNotFoundError for an optional package that one of these three imports."""

    def find_spec(self, name, path=None, target=None):
        if name not in OPTIONAL_PACKAGES:
            return None
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame is not None else ""
        # Not from a function: that is where Keras imports a package because someone uses it.
        if importer.partition(".")[0] in ("keras", "tensorflow", "sklearn") and frame.f_code.co_name == "<module>":
            raise ModuleNotFoundError(f"tests/lean_start hides {name} from {importer}", name=name)
        return None


sys.meta_path.insert(0, HiddenPackages())
