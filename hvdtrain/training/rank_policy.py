"""Which Keras callbacks run on which ranks: writers on rank 0, all others on every rank."""

from collections.abc import Sequence

import keras

from hvdtrain.errors import UsageError

TRAIN_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def only_writes(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback runs on rank 0 only: Keras' writers, and those with ``only_on_rank_zero = True``."""
    return isinstance(callback, _WRITERS) or getattr(callback, "only_on_rank_zero", False)


def require_usable(callbacks: Sequence[keras.callbacks.Callback], resume_with: str) -> None:
    """Refuses what cannot work on several ranks.

    Args:
        resume_with: what a run is resumed with instead of BackupAndRestore.

    Raises:
        UsageError: an object is not a callback, or restores a run on rank 0 only.
    """
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(f"callbacks must be Keras callbacks. Received: {callback!r}")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UsageError(
                "callbacks must not restore a run. Received: BackupAndRestore, which would restore rank 0 only. "
                f"Leave it out: {resume_with}."
            )


def uses_train_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is called at training batches."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_freq != "epoch"
    return overrides(callback, TRAIN_BATCH_HOOKS)


def overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    """Whether a callback implements one of the hooks."""
    # On the object: LambdaCallback sets its functions there.
    methods = [(getattr(callback, hook), getattr(keras.callbacks.Callback, hook)) for hook in hooks]
    return any(getattr(method, "__func__", method) is not default for method, default in methods)
