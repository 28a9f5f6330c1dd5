from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyRichRst(PythonPackage):
    """reStructuredText in terminals, by Rich."""

    homepage = "https://github.com/wasi-master/rich-rst"
    pypi = "rich-rst/rich_rst-2.2.0.tar.gz"

    license("MIT")

    version("2.2.0", sha256="b1e6a67f8f694a6f36035624bf73e2b1a0a4be13edaf3ba5e654d9758b61073a")

    depends_on("py-setuptools@77:", type="build")  # names its license in the way of PEP 639

    with default_args(type=("build", "run")):
        depends_on("py-pygments@2:")
        depends_on("py-rich@12:")
