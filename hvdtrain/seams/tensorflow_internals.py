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
USES_ONEDNN = ImportedSeam(
    "tensorflow.python.util._pywrap_util_port",
    "IsMklEnabled",
    "reports whether TensorFlow computes with oneDNN",
    library="tensorflow",
)
MAY_RECORD = ImportedSeam(
    "tensorflow.python.eager.record",
    "could_possibly_record",
    "reports whether a tape records, so that samples are gathered in a training step only",
    library="tensorflow",
)
RESOURCE_VARIABLE = ImportedSeam(
    "tensorflow.python.ops.resource_variable_ops",
    "BaseResourceVariable",
    "notes which variables a checked step writes",
    library="tensorflow",
)
EXECUTE = ImportedSeam(
    "tensorflow.python.eager.execute",
    "quick_execute",
    "is where a rank is while it runs a compiled function, and so while it waits for others",
    library="tensorflow",
)
WRITES = ("assign", "scatter_", "batch_scatter_")
"""How the names of the methods begin that write a variable."""
CONTEXT = ImportedSeam(
    "tensorflow.python.eager.context", "context", "holds the seed of eager operations", library="tensorflow"
)
CONTEXT_SEEDS = ("_seed", "_rng")
"""Attributes of the context: the seed of eager operations, and what draws one for each of them."""
SKIP = Seam(
    "Generator", "_skip_single_var", "gives generators the same state on all ranks for a check", library="tensorflow"
)


def _draws(module: str, *names: str) -> list[ImportedSeam]:
    use = "draws alike on all ranks while a step is checked"
    return [ImportedSeam(f"tensorflow.python.ops.{module}", name, use, library="tensorflow") for name in names]


DRAWS = [
    *_draws(
        "gen_random_ops",
        *("random_standard_normal", "random_uniform", "random_uniform_int", "truncated_normal"),
        *("parameterized_truncated_normal", "multinomial", "random_gamma", "random_poisson_v2"),
    ),
    *_draws(
        "gen_stateless_random_ops_v2",
        *("stateless_random_normal_v2", "stateless_random_uniform_v2", "stateless_random_uniform_int_v2"),
        *("stateless_random_uniform_full_int_v2", "stateless_truncated_normal_v2", "stateless_random_gamma_v3"),
    ),
    *_draws(
        "gen_stateless_random_ops",
        *("stateless_multinomial", "stateless_random_binomial", "stateless_random_poisson"),
        "stateless_parameterized_truncated_normal",
    ),
    *_draws("gen_stateful_random_ops", "stateful_random_binomial"),
]
"""TensorFlow's random operations."""
SHUFFLES = [
    *_draws("gen_random_ops", "random_shuffle"),
    *_draws("gen_stateless_random_ops_v2", "stateless_shuffle"),
]
"""TensorFlow's operations that shuffle rows."""
SAVE_EXPORTED = ImportedSeam(
    "tensorflow.python.saved_model.save",
    "save_and_return_nodes",
    "writes an exported model to a path that is this rank's, until it is whole",
    library="tensorflow",
)
CHECKPOINT_SAVER = ImportedSeam(
    "tensorflow.python.checkpoint.checkpoint",
    "TrackableSaver",
    "writes the files of tf.train.Checkpoint",
    library="tensorflow",
)
SAVE = Seam("TrackableSaver", "save", "writes to a path that is this rank's, until it is whole", library="tensorflow")
DATASET_INPUTS = Seam(
    "Dataset", "_inputs", "lists what a data set is made of, to find how it is shuffled", library="tensorflow"
)
INNER_DATASET = "_impl"
"""The attribute of a data set of files: the data set that reads them, whose inputs it has."""
DATASET_ARRAYS = "_tensors"
"""The attribute of a data set that is made of tensors."""
COMPLETE_DATASETS = (
    "_TensorSliceDataset",
    "_ZipDataset",
    "_ShuffleDataset",
    "_RepeatDataset",
    "CacheDataset",
    "_MapDataset",
    "_ParallelMapDataset",
    "_BatchDataset",
    "_ParallelBatchDataset",
    "_PaddedBatchDataset",
    "_PrefetchDataset",
    "_OptionsDataset",
)
"""Classes of data sets that have all elements of the data sets that they are made of."""
DATASET_ORDER = "_deterministic"
"""The attribute of a data set that an operation with an argument ``deterministic`` makes: default, true or false."""
INTERLEAVED = ImportedSeam(
    "tensorflow.python.data.ops.interleave_op",
    "_ParallelInterleaveDataset",
    "is the only parallel operation on data sets that does not keep this attribute",
    library="tensorflow",
)
CYCLE_LENGTH = "_cycle_length"
"""The attribute of a data set that interleaves others: how many at once."""
FILTER_FUNCTION, MAP_FUNCTION = "_predicate", "_map_func"
"""Attributes of data sets that have functions: that of ``filter``, and those of ``map``, ``interleave`` and others."""
SHUFFLE_SEEDS = ("_seed", "_seed2")
"""Attributes of a data set that shuffles; 0: no seed."""
IS_COMPILED_BY_XLA = ImportedSeam(
    "tensorflow.python.ops.control_flow_util",
    "GraphOrParentsInXlaContext",
    "tells whether XLA will compile the function that is traced",
    library="tensorflow",
)
NO_INLINE = {"_noinline": True}
"""Attributes of a function that stays one operation in the graph that calls it."""
