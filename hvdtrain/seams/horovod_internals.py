"""The internal names of Horovod that hvdtrain uses; its C++ is changed by ``launch/horovod``, for one version."""

from hvdtrain.seams.seam import ImportedSeam, Seam

OWN_OPTIMIZER = (
    Seam("DistributedOptimizer", "_allreduce_grads", "identifies Horovod's own optimizers", library="horovod"),
    Seam("DistributedOptimizer", "_HAS_AGGREGATE_GRAD", "identifies Horovod's own optimizers", library="horovod"),
)

OPERATIONS = ImportedSeam(
    "horovod.tensorflow.mpi_ops", "MPI_LIB", "makes TensorFlow compute Horovod's operations in steps only", "horovod"
)
