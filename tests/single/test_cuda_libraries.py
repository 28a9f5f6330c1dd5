"""TensorFlow opens CUDA's libraries where the extra ``cuda`` installs them; a driver's stand-in shows it a GPU."""

import json
import os
import subprocess
import sys

import pytest
from shared_libraries import make_library

from hvdtrain.system.cuda_libraries import LIBRARIES, errors_of_opening

# Answers what TensorFlow asks for before it lists a GPU.
DRIVER = """
#include <stddef.h>
#include <string.h>
enum { NUM_MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 };
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12090; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Stand-in GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)8 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : attribute == NUM_MULTIPROCESSORS ? 132 : 1;
  return 0;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) { strncpy(text, "0000:01:00.0", length); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = *total = (size_t)8 << 30; return 0; }
"""
MANAGEMENT = "int nvmlInit_v2(void) { return 0; } int nvmlShutdown(void) { return 0; }"
PROGRAM = """
import hvdtrain.system.tensorflow_start as start
start.import_tensorflow()
import json, tensorflow as tf
from hvdtrain.system import cuda_libraries
errors = cuda_libraries.errors_of_opening(start.library())
print("FOUND", json.dumps([len(tf.config.list_physical_devices("GPU")), errors]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "incomplete"])
def test_tensorflow_lists_a_gpu(is_complete, tmp_path):
    """Without the packages themselves (1.5 GB): their folders, but for cuSOLVER's, are in LD_LIBRARY_PATH."""
    folder, packages = tmp_path / "libraries", tmp_path / "packages"
    make_library(folder / "libcuda.so.1", DRIVER)
    make_library(folder / "libnvidia-ml.so.1", MANAGEMENT)
    for name in LIBRARIES:
        if name != "libcusolver.so.11":
            make_library(folder / name)
    needed = make_library(packages / "nvidia/nvjitlink/lib/libnvJitLink.so.12", "int needed;")
    solver = packages / "nvidia/cusolver/lib/libcusolver.so.11"
    make_library(
        solver, "extern int needed; int *used = &needed;", str(needed), "-Wl,-rpath,$ORIGIN/../../nvjitlink/lib"
    )
    if not is_complete:
        needed.unlink()
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=env)
    num_gpus, errors = json.loads(done.stdout.partition("FOUND ")[2])
    if is_complete:
        assert (num_gpus, errors) == (1, {}), done.stderr
    else:
        assert num_gpus == 0
        assert errors.keys() == {"libcusolver.so.11"}
        assert "libnvJitLink.so.12: cannot open shared object file" in errors["libcusolver.so.11"]


def test_libraries_are_looked_for_as_their_opener_does(tmp_path):
    opener = make_library(tmp_path / "libopener.so", "int unused;", f"-Wl,-rpath,{tmp_path}/cudnn:{tmp_path}/cublas")
    make_library(tmp_path / "cudnn/libcudnn.so.9")
    make_library(tmp_path / "elsewhere/libcufft.so.11")
    (tmp_path / "cublas").mkdir()
    (tmp_path / "cublas/libcublas.so.12").write_text("no library")
    errors = errors_of_opening(opener)
    assert errors.keys() == set(LIBRARIES) - {"libcudnn.so.9"}
    assert "cannot open shared object file" in errors["libcufft.so.11"]
    assert "file too short" in errors["libcublas.so.12"] or "invalid ELF header" in errors["libcublas.so.12"]
