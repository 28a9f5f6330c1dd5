"""Horovod's BroadcastGlobalVariablesCallback for Keras 3."""

import functools
from typing import Any

import keras

from hvdtrain.distributed import replica_consistency
from hvdtrain.errors import UsageError
from hvdtrain.optim.pipeline import require_pipelines


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Calls :func:`hvdtrain.broadcast` before the first step: all ranks start with rank 0's variables.

    Also supports models that are built in their first step, for which ``hvdtrain.broadcast(model)`` would be too early.

    Raises:
        UsageError: ``root_rank`` is not 0; or, when training begins, the optimizer is not distributed, or the model is
            neither built nor compiled into a graph.
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        if root_rank != 0:
            raise UsageError(f"root_rank must be 0: rank 0 owns checkpoints and seeds. Received: {root_rank}")
        self._is_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._is_done:
            return
        self._is_done = True
        pipelines = require_pipelines(self.model)
        if self.model.built:
            replica_consistency.broadcast(self.model)
        elif self.model.run_eagerly:
            raise UsageError(
                "a model that runs eagerly must be built before it is trained on several ranks. Received: "
                f"{self.model.name!r}. Call it once on a batch, or leave out run_eagerly."
            )
        else:
            # Tracing the first step, before it runs, builds the model. No other variables may be created there.
            replica_consistency.global_stream()
            broadcast = functools.cache(functools.partial(replica_consistency.broadcast, self.model))
            for _, pipeline in pipelines:  # It is not known here which optimizer applies gradients first.
                if pipeline.start is not None:
                    pipeline.start.broadcast_first(broadcast)
