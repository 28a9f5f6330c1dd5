from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdtrain(PythonPackage):
    """Trains Keras 3 models on many processes with Horovod's ring allreduce, equal to one process."""

    pypi = "hvdtrain/hvdtrain-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0")

    depends_on("python@3.10:3.13", type=("build", "run"))
    depends_on("py-hatchling@1.27:1", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-tensorflow@2.18:2.21")
        depends_on("py-keras@3.9:3.15 backend=tensorflow")
        depends_on("py-hvdtrain-horovod@0.28.1.post5")
        depends_on("py-mpi4py@4")
        depends_on("py-numpy@1.26:2")
        depends_on("py-packaging@23:")
        depends_on("py-cyclopts@4.25:5")
        depends_on("py-psutil@6:7")
        depends_on("py-cloudpickle@3")
        depends_on("py-google-crc32c@1.6:1")
        depends_on("py-rich@13:15")
        depends_on("py-tensorboard@2.18:2")
        depends_on("py-tomli@2", when="^python@:3.10")
