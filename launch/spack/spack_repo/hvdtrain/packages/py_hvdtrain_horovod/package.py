from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHvdtrainHorovod(PythonPackage):
    """Horovod 0.28.1 for one TensorFlow and one MPI, as hvdtrain needs it."""

    homepage = "https://github.com/horovod/horovod"
    pypi = "hvdtrain-horovod/hvdtrain_horovod-0.28.1.post5.tar.gz"

    license("Apache-2.0")

    version("0.28.1.post5")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.20:3", type="build")
    depends_on("patchelf@0.17:", type="build")
    depends_on("py-pip", type="build")
    depends_on("py-wheel", type="build")

    depends_on("mpi")
    depends_on("python@3.10:3.13", type=("build", "run"))
    depends_on("py-setuptools@:79", type="build")
    with default_args(type=("build", "run")):
        depends_on("py-tensorflow@2.18:2.21")
        depends_on("py-cloudpickle")
        depends_on("py-psutil")
        depends_on("py-pyyaml")
        depends_on("py-packaging")

    import_modules = ["horovod", "horovod.tensorflow"]

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("HVDTRAIN_TENSORFLOW", "installed")
        env.set("HVDTRAIN_MPI", "site")
        env.set("MPI_HOME", self.spec["mpi"].prefix)
        env.set("MAKEFLAGS", f"-j{make_jobs}")
