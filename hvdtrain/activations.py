"""What the layers of a model give for a few samples, to draw histograms of."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data import Source, evaluation_dataset

_NUM_SAMPLES = 32


class Activations:
    """The outputs of a model's layers, for the first 32 samples of a source, as in inference.

    Nothing for a model that calls its layers in code of its own (a subclass): they have no outputs to ask for.
    """

    def __init__(self, model: keras.Model, source: Source):
        self._model = model
        self._source = source

    def read(self) -> Mapping[str, np.ndarray]:
        """The values now, float32, by the layers' names."""
        if not self._outputs:
            return {}
        outputs = keras.Model(self._model.inputs, list(self._outputs.values()))
        values = outputs(self._inputs, training=False)
        return {name: np.asarray(tf.cast(each, tf.float32)) for name, each in zip(self._outputs, values, strict=True)}

    @functools.cached_property
    def _outputs(self) -> dict[str, keras.KerasTensor]:
        if not getattr(self._model, "inputs", None):
            return {}
        # A layer that is called more than once has no output of its own.
        outputs = {
            layer.name: getattr(layer, "output", None)
            for layer in self._model.layers
            if not isinstance(layer, keras.layers.InputLayer)
        }
        return {name: output for name, output in outputs.items() if isinstance(output, keras.KerasTensor)}

    @functools.cached_property
    def _inputs(self) -> Any:
        x, *_ = next(iter(evaluation_dataset(self._source, _NUM_SAMPLES, rank=0, size=1)))
        return x
