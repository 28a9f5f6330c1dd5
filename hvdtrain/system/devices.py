"""The GPU and the compute threads of this rank."""

from collections.abc import Sequence

from hvdtrain.errors import UsageError
from hvdtrain.seams import tensorflow_internals
from hvdtrain.system import cores
from hvdtrain.system.tensorflow_start import without_startup_messages


def choose_gpu(num_gpus: int, local_rank: int, local_size: int) -> int | None:
    """The GPU of a rank, by local rank; ranks beyond the number of GPUs share them in turn.

    If the launcher makes only one GPU visible to each of several ranks, that one is taken.

    Returns:
        The index among the visible GPUs; None if there is none.
    """
    assert 0 <= local_rank < local_size
    return local_rank % num_gpus if num_gpus else None


def configure_devices(
    local_rank: int, local_size: int, threads: int | None, bound_to_cores: bool, gpu_memory_mib: int | None = None
) -> str:
    """Pins this rank's GPU, and divides the host's cores among its ranks.

    Args:
        gpu_memory_mib: what it may use of the GPU's memory; None: as much as it needs, growing.

    Returns:
        The device this rank computes on: ``GPU:1`` or ``CPU``.

    Raises:
        UsageError: TensorFlow has used the GPUs already.
    """
    import tensorflow as tf

    gpus: Sequence[object] = tf.config.list_physical_devices("GPU")
    index = choose_gpu(len(gpus), local_rank, local_size)
    if index is not None:
        try:
            tf.config.set_visible_devices(gpus[index], "GPU")
            if gpu_memory_mib is None:
                tf.config.experimental.set_memory_growth(gpus[index], True)
            else:
                limit = tf.config.LogicalDeviceConfiguration(memory_limit=gpu_memory_mib)
                tf.config.set_logical_device_configuration(gpus[index], [limit])
        except RuntimeError as error:
            raise UsageError(
                "hvdtrain.init() must be called before TensorFlow uses the GPUs, of which this rank takes one. "
                f"Received: a call after that ({error}). Call it first, before models, datasets and tensors are made."
            ) from error
    count = threads or cores.threads_per_rank(cores.usable_cores(), local_size, bound_to_cores)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(cores.inter_op_threads(count))
    except RuntimeError:
        # The caller used TensorFlow before init(): its thread pools exist and stay as they are.
        if threads is not None:
            raise
    with without_startup_messages():
        tf.config.list_logical_devices()
    return "CPU" if index is None else f"GPU:{index}"


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def uses_onednn() -> bool:
    """Whether TensorFlow computes with oneDNN on CPUs."""
    return bool(tensorflow_internals.USES_ONEDNN.value()())


def own_gpu() -> str | None:
    """The device name of this rank's GPU; None if it has none."""
    return "/GPU:0" if has_gpu() else None


def computes_on_one_core() -> bool:
    """Whether this rank has one compute thread and no GPU: anything that runs beside its step only delays it."""
    import tensorflow as tf

    return bool(tf.config.threading.get_intra_op_parallelism_threads() == 1) and not has_gpu()


def is_deterministic() -> bool:
    """Whether TensorFlow refuses operations whose outcome may vary, reading the clock included."""
    return bool(tensorflow_internals.IS_DETERMINISTIC.value()())
