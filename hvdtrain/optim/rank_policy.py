"""On which ranks Keras callbacks run: writers on rank 0, all others on every rank."""

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.config import exclusions
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.shards import has_tables
from hvdtrain.errors import UsageError

TRAIN_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
# Looked up by name, because not every Keras has all of them.
PLACES = {
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "ProgbarLogger": None,
    "RemoteMonitor": "root",
    "TensorBoard": "log_dir",
}
"""Keras' callbacks that write, and the attribute that says where."""
_WRITERS = tuple(getattr(keras.callbacks, name) for name in PLACES if hasattr(keras.callbacks, name))
_TRACKERS = frozenset(
    {"aim", "clearml", "comet_ml", "dvclive", "livelossplot", "mlflow", "neptune", "swanlab", "tqdm", "wandb"}
)
"""Packages whose callbacks write logs, or show progress, and decide nothing."""
_SAVERS = ("ModelCheckpoint", "OrbaxCheckpoint")
DECIDERS = (
    *("EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler", "ReduceLROnPlateau"),
    *("SwapEMAWeights", "TerminateOnNaN"),
)
"""Keras' callbacks that run on every rank, like a user's own."""
PASS_ALL_CALLBACKS = (
    "Pass all callbacks on every rank: those that write run on rank 0 only. Set only_on_rank_zero = True on one of "
    "your own that only writes."
)


def only_writes(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback runs on rank 0 only: Keras' writers, trackers, and those with ``only_on_rank_zero = True``."""
    packages = {each.__module__.partition(".")[0] for each in type(callback).__mro__}
    return isinstance(callback, _WRITERS) or getattr(callback, "only_on_rank_zero", not packages.isdisjoint(_TRACKERS))


def names_on_every_rank(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The classes of the callbacks that must be the same on all ranks; writers may be given to rank 0 alone."""
    return [type(each).__name__ for each in callbacks if not only_writes(each)]


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


def require_savable(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Refuses Keras' callbacks that save the model on rank 0 if its tables are sharded over ranks.

    Raises:
        UsageError: there is one.
    """
    if has_tables(model) and any(map(saves_weights, callbacks)):
        exclusions.require_compatible(exclusions.facts_from(exclusions.SHARDED_TABLE, exclusions.SAVED_BY_KERAS))


def require_own_places(callbacks: Sequence[keras.callbacks.Callback], collectives: Collectives) -> None:
    """Refuses writers of several ranks that write to one place. All ranks must call it.

    Raises:
        UsageError: on every rank.
    """
    own = {place for each in callbacks if (place := place_of(each)) is not None}
    seen: dict[tuple[str, str], int] = {}
    for rank, places in enumerate(collectives.allgather(own)):
        for name, path in sorted(places):
            first = seen.setdefault((name, path), rank)
            if first != rank:
                remedy = (
                    "Use hvdtrain.callbacks.Checkpoint instead"
                    if name == "BackupAndRestore"
                    else "Pass callbacks=hvdtrain.callbacks.distributed([…]): those that write then run on rank 0 only"
                )
                raise UsageError(
                    f"only one rank must write to a place. Received: {name} on ranks {first} and {rank}, which both "
                    f"write to {path!r}. {remedy}."
                )


def place_of(callback: keras.callbacks.Callback) -> tuple[str, str] | None:
    """The class of a callback that writes, and where it writes to; None for others."""
    for name, attribute in {**PLACES, "BackupAndRestore": "backup_dir"}.items():
        kind: Any = getattr(keras.callbacks, name, None)
        if kind is not None and attribute is not None and isinstance(callback, kind):
            return name, str(getattr(callback, attribute, ""))
    return None


def uses_train_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is called at training batches."""
    if saves_weights(callback):
        return callback.save_freq != "epoch"
    return overrides(callback, TRAIN_BATCH_HOOKS)


def saves_weights(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback saves the model, at the ends of epochs or every ``save_freq`` batches."""
    return any(isinstance(callback, getattr(keras.callbacks, name, ())) for name in _SAVERS)


def overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    """Whether a callback implements one of the hooks."""
    # On the object: LambdaCallback sets its functions there.
    methods = [(getattr(callback, hook), getattr(keras.callbacks.Callback, hook)) for hook in hooks]
    return any(getattr(method, "__func__", method) is not default for method, default in methods)
