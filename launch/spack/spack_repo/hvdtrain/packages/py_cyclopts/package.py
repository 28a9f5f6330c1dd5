from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyCyclopts(PythonPackage):
    """Command lines from the type hints of functions and classes."""

    homepage = "https://github.com/BrianPugh/cyclopts"
    pypi = "cyclopts/cyclopts-4.25.3.tar.gz"

    license("Apache-2.0")

    version("4.25.3", sha256="7d3a067bc7699a1a65fe2ea0b092a925855bb711a05adc1e65c5b9ba307acea4")

    depends_on("py-hatchling", type="build")
    depends_on("py-hatch-vcs", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-attrs@23.1:")
        depends_on("py-docstring-parser@0.15:3")
        depends_on("py-rich-rst@1.3.1:2")
        depends_on("py-rich@13.6:")
        depends_on("py-tomli@2:", when="^python@:3.10")
        depends_on("py-typing-extensions@4.8:", when="^python@:3.10")
