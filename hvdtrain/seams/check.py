"""Whether this version of Keras has the names that hvdtrain uses, and calls what hvdtrain replaces."""

import functools
from collections.abc import Callable
from typing import Any

from hvdtrain.seams import keras_internals as names
from hvdtrain.seams.seam import Seam, unsupported

_STEPS = 2


def require_known_keras() -> None:
    """Trains the smallest model that uses every seam into Keras for two steps, in about 0.2 s.

    Raises:
        UsageError: a name is missing, or Keras does not call it.
    """
    import keras
    import numpy as np

    for each in names.IMPORTED_SEAMS:
        each.value()
    called: set[Seam] = set()

    def watch(thing: Any, *seams: Seam) -> None:
        for seam in seams:
            method = seam.of(thing)
            seam.set(thing, _noting(functools.partial(called.add, seam), method))

    normalization = keras.layers.BatchNormalization()
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(2, kernel_regularizer="l2", name="hidden")(inputs)
    model = keras.Model(inputs, normalization(hidden))
    optimizer = keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9),
        momentum=0.9,
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=1,
        gradient_accumulation_steps=2,
    )
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mae"])
    watch(normalization, names.MOMENTS)
    watch(model, names.COMPUTE_LOSS, names.ADDITIONAL_LOSS)
    watch(optimizer, *(seam for seam in names.SEAMS if seam.is_called and seam.owner == "Optimizer"))
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    names.SYMBOLIC_BUILD.of(model)(data_batch=(keras.KerasTensor(x.shape), keras.KerasTensor(y.shape)))
    for _ in range(_STEPS):
        model.train_step((keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)))
    with_momentums = keras.optimizers.RMSprop(momentum=0.9)
    with_momentums.build(model.trainable_variables)
    with_accumulators = keras.optimizers.Adagrad()
    with_accumulators.build(model.trainable_variables)
    embedding = keras.layers.Embedding(2, 1)
    embedding.build()
    owners = {
        "Embedding": embedding,
        "Layer": normalization,
        "BatchNormalization": normalization,
        "Model": model,
        "Functional": model,
        "CompileMetrics": names.COMPILED_METRICS.of(model),
        "TFEpochIterator": names.EPOCH_ITERATOR.value(),
        "Optimizer": optimizer,
        "RMSprop": with_momentums,
        "Adagrad": with_accumulators,
    }
    for seam in names.SEAMS:
        seam.of(owners[seam.owner])
        if seam.is_called and seam not in called:
            raise unsupported("keras", f"{seam.owner}.{seam.name}, which {seam.use}, not called")


def _noting(note: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        note()
        return method(*arguments, **named)

    return noted
