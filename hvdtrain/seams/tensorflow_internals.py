"""The internal names of TensorFlow that hvdtrain uses."""

from hvdtrain.seams.seam import ImportedSeam, Seam

ITERATOR_RESOURCE = Seam(
    "OwnedIterator",
    "_iterator_resource",
    "receives another dataset, so that a step is not compiled again",
    library="tensorflow",
)
IS_DETERMINISTIC = ImportedSeam(
    "tensorflow.python.framework.config",
    "is_op_determinism_enabled",
    "reports whether operations are deterministic",
    library="tensorflow",
)
MAY_RECORD = ImportedSeam(
    "tensorflow.python.eager.record",
    "could_possibly_record",
    "reports whether a tape records, so that samples are gathered in a training step only",
    library="tensorflow",
)
NO_INLINE = {"_noinline": True}
"""Attributes of a function that stays one operation in the graph that calls it."""
