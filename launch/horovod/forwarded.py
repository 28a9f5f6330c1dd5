"""The environment variables that launchers forward to other hosts."""

import re

# What a job may need. All others, which may include secrets, are not forwarded; the token goes another way.
FORWARDED = re.compile(
    r"(?!HOROVOD_RENDEZVOUS_TOKEN)(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|LANG|LC_.*|TZ|HOME|TMPDIR|PYTHON.*|HVDTRAIN_.*|HOROVOD_.*|NCCL_.*|"
    r"CUDA_VISIBLE_DEVICES|TF_.*|XLA_.*|KERAS_.*|OMP_.*|OMPI_MCA_.*|FI_.*|I_MPI_.*|MPIR_CVAR_.*|UCX_.*|OPAL_PREFIX|"
    r"NO_COLOR|TERM)"
)
