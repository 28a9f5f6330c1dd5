from spack.package import *
from spack_repo.builtin.packages.py_google_crc32c.package import PyGoogleCrc32c as BuiltinPackage


class PyGoogleCrc32c(BuiltinPackage):
    """Spack's own package, with a later version."""

    pypi = "google-crc32c/google_crc32c-1.9.0.tar.gz"

    version("1.9.0", sha256="7b8c84c3d159ab6817fe3f74e6e6cef099c3f95dcec3abc0d8afb1404642efbe")

    depends_on("python@3.10:", type=("build", "run"), when="@1.9:")
