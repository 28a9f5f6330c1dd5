"""The outputs of a model's layers for a few samples, for histograms."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data import Source, evaluation_dataset

_NUM_SAMPLES = 32


class Activations:
    """The outputs of a model's layers in inference, for the first 32 samples of a source.

    Nothing for a subclassed model, which calls its layers in its own code: they have no symbolic outputs.
    """

    def __init__(self, model: keras.Model, source: Source):
        self._model = model
        self._source = source

    def read(self) -> Mapping[str, np.ndarray]:
        """The current values, float32, by layer name."""
        if not self._outputs:
            return {}
        outputs = keras.Model(self._model.inputs, list(self._outputs.values()))
        values = outputs(self._inputs, training=False)
        return {name: np.asarray(tf.cast(each, tf.float32)) for name, each in zip(self._outputs, values, strict=True)}

    @functools.cached_property
    def _outputs(self) -> dict[str, keras.KerasTensor]:
        if not getattr(self._model, "inputs", None):
            return {}
        # A layer that is called more than once has no single output.
        outputs = {
            layer.name: getattr(layer, "output", None)
            for layer in self._model.layers
            if not isinstance(layer, keras.layers.InputLayer)
        }
        return {name: output for name, output in outputs.items() if isinstance(output, keras.KerasTensor)}

    @functools.cached_property
    def _inputs(self) -> Any:
        batch = next(iter(evaluation_dataset(self._source, _NUM_SAMPLES, rank=0, size=1)))
        return keras.utils.unpack_x_y_sample_weight(batch)[0]
