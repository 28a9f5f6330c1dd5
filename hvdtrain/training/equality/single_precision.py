"""A step in single precision, of a program that computes in half precision: without rounding, equal steps are equal.

On CPUs, TensorFlow adds up the gradient of a convolution's bias in bfloat16, where a sum of ones ends at 256. Weights
that differ in the last places do not show such an error, which is the same for each of them. On some processors, the
error of other gradients is as large as a missing average: it neither shows a difference nor excuses one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras

from hvdtrain.seams import keras_internals

_HALVES = ("bfloat16", "float16")


def computes_in_half_precision(model: keras.Model) -> bool:
    """Whether a layer does, whose dtype can be changed."""
    return bool(_layers_in_half_precision(model))


@contextmanager
def single_precision(model: keras.Model) -> Iterator[None]:
    """In the block, layers that compute in half precision compute in float32, with the same weights."""
    with ExitStack() as stack:
        for layer in _layers_in_half_precision(model):
            stack.callback(setattr, layer, "dtype_policy", layer.dtype_policy)
            layer.dtype_policy = "float32"
        yield


def _layers_in_half_precision(model: keras.Model) -> list[keras.layers.Layer]:
    # A map of policies belongs to several layers; quantized weights have a dtype of their own.
    return [
        layer
        for layer in keras_internals.FLATTEN_LAYERS.of(model)()
        if layer.compute_dtype in _HALVES
        and layer.quantization_mode is None
        and not isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    ]
