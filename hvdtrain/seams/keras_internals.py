"""The internal names of Keras that hvdtrain uses."""

from hvdtrain.seams.seam import ImportedSeam, Seam

# Layers.
FLATTEN_LAYERS = Seam("Layer", "_flatten_layers", "lists the layers of a model and of its parts")
NON_TRAINABLE_VARIABLES = Seam("Layer", "_non_trainable_variables", "holds what an interrupted step may have changed")
EMBEDDINGS = Seam("Embedding", "_embeddings", "is this rank's shard of a table")
MOMENTS = Seam("BatchNormalization", "_moments", "computes mean and variance over all ranks", is_called=True)
REDUCTION_AXES = Seam("BatchNormalization", "_reduction_axes", "names the axes of mean and variance")
MASK = ImportedSeam("keras.src.backend.common.masking", "get_keras_mask", "returns the mask by which a loss is divided")
SET_MASK = ImportedSeam("keras.src.backend.common.masking", "set_keras_mask", "keeps the mask of gathered predictions")

# Models.
COMPUTE_LOSS = Seam("Model", "_compute_loss", "is checked to return one number", is_called=True)
ADDITIONAL_LOSS = Seam("Model", "_aggregate_additional_loss", "divides regularization by the ranks", is_called=True)
LOSS_TRACKER = Seam("Model", "_loss_tracker", "averages the losses of an epoch")
COMPILED_METRICS = Seam("Model", "_compile_metrics", "holds the metrics of compile()")
USER_METRICS = Seam("CompileMetrics", "_user_metrics", "holds the metrics of compile()")
USER_WEIGHTED_METRICS = Seam("CompileMetrics", "_user_weighted_metrics", "holds the weighted metrics of compile()")
METRICS_OF_COMPILE = ImportedSeam(
    "keras.src.trainers.compile_utils", "CompileMetrics", "creates the variables of metrics in the first step"
)
LOSSES_OF_COMPILE = ImportedSeam(
    "keras.src.trainers.compile_utils", "CompileLoss", "creates the means of several losses in the first step"
)
FLATTEN_RESULTS = Seam("Model", "_flatten_metrics_in_order", "orders what model.evaluate returns")
SHOULD_EVALUATE = Seam("Model", "_should_eval", "leaves out validations that were made before a run was resumed")
INITIAL_EPOCH = Seam("Model", "_initial_epoch", "leaves out the epochs of a run that is resumed")
JIT_COMPILE = Seam("Model", "_jit_compile", "is cleared while a train_step that reduces is compiled")
SYMBOLIC_BUILD = Seam("Model", "_symbolic_build", "creates the variables of metrics")
BUILD_SHAPES = Seam("Model", "_build_shapes_dict", "is restored if a model cannot be built from shapes")
INPUTS = Seam("Functional", "_inputs_struct", "names the structure of a model's inputs")
EPOCH_ITERATOR = ImportedSeam(
    "keras.src.backend.tensorflow.trainer", "TFEpochIterator", "makes the iterators of fit, evaluate and predict"
)
EPOCH_DATASET = Seam("TFEpochIterator", "_get_iterator", "returns the dataset of an epoch, which is not autotuned")

# Files.
RETRIEVE_URL = ImportedSeam(
    "keras.src.utils.file_utils", "urlretrieve", "downloads a file once for all ranks of a host"
)
EXTRACT_ARCHIVE = ImportedSeam(
    "keras.src.utils.file_utils", "extract_archive", "extracts an archive once for all ranks"
)

_SAVES = "writes a model to a path that is this rank's, until it is whole"
SAVE_MODEL = ImportedSeam("keras.src.saving.saving_lib", "save_model", _SAVES)
SAVE_WEIGHTS = ImportedSeam("keras.src.saving.saving_lib", "save_weights_only", _SAVES)
SAVE_HDF5 = ImportedSeam("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", _SAVES)

# Optimizers.
ITERATIONS = Seam("Optimizer", "_iterations", "counts the micro-batches")
LEARNING_RATE = Seam("Optimizer", "_learning_rate", "is the learning rate or its schedule")
CURRENT_LEARNING_RATE = Seam("Optimizer", "_get_current_learning_rate", "computes a learning rate", is_called=True)
TRAINABLE_VARIABLES = Seam("Optimizer", "_trainable_variables", "lists what an optimizer trains")
VARIABLES = Seam("Optimizer", "_variables", "holds what an interrupted step may have changed")
ACCUMULATED_GRADIENTS = Seam("Optimizer", "_accumulated_gradients", "holds what an interrupted step may have changed")
MOMENTUMS = Seam("RMSprop", "_momentums", "is scaled with the learning rate")
ACCUMULATORS = Seam("Adagrad", "_accumulators", "is updated at the rows of a sparse gradient")
VARIABLE_KEY = Seam("Optimizer", "_var_key", "identifies a variable")
VARIABLE_INDEX = Seam("Optimizer", "_get_variable_index", "finds the state of a variable", is_called=True)
USE_WEIGHT_DECAY = Seam("Optimizer", "_use_weight_decay", "decides which variables decay", is_called=True)
CLIP = Seam("Optimizer", "_clip_gradients", "reduces, checks and clips gradients", is_called=True)
DECAY = Seam("Optimizer", "_apply_weight_decay", "decays weights after the reduction", is_called=True)
UPDATE = Seam("Optimizer", "_backend_update_step", "updates variables after the reduction", is_called=True)
AVERAGE = Seam("Optimizer", "_update_model_variables_moving_average", "updates the EMA once a step", is_called=True)
EMA = Seam("Optimizer", "_model_variables_moving_average", "holds the EMA of the variables")
OVERWRITE = Seam(
    "Optimizer", "_overwrite_model_variables_with_average_value", "overwrites variables with their EMA", is_called=True
)

# Random numbers.
GLOBAL_ATTRIBUTE = ImportedSeam(
    "keras.src.backend.common.global_state", "get_global_attribute", "finds the global generator, without making one"
)
SET_GLOBAL_ATTRIBUTE = ImportedSeam(
    "keras.src.backend.common.global_state", "set_global_attribute", "removes a global generator that was made since"
)
GLOBAL_GENERATOR = ImportedSeam(
    "keras.src.random.seed_generator", "global_seed_generator", "returns the global generator"
)
SHUFFLE = ImportedSeam(
    "keras.src.backend.tensorflow.random", "shuffle", "shuffles alike on all ranks while a step is checked"
)

# Imports.
DEFERRED_PACKAGES = ("keras.wrappers", "keras.visualization", "keras.src.visualization")
"""Packages that import scikit-learn and Matplotlib; where one is missing, nothing is deferred."""

# Errors.
CALL_INFO = "_keras_call_info_injected"
"""An attribute of an exception: if it is set, Keras adds no lines to an error that is raised in a layer."""

SEAMS = [each for each in list(globals().values()) if isinstance(each, Seam)]
IMPORTED_SEAMS = [each for each in list(globals().values()) if isinstance(each, ImportedSeam)]
