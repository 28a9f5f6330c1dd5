"""Where in a step the first difference between all ranks and one process appears."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.seams import keras_internals
from hvdtrain.training.equality.samples import Rows

_FORWARD = (
    "the output of layer {name} for a sample depends on the other samples of the batch. Received: {share} of it "
    "differs on each rank's part. Compute it of hvdtrain.gather(samples), or of each sample alone"
)
_LOSS = (
    "the loss of a batch must be the mean of the losses of its samples. Received: {name}, whose mean over ranks "
    "differs from that of the whole batch by {share}. Wrap it in hvdtrain.WholeBatch, or compute it of "
    "hvdtrain.gather(samples); return one value for each sample, or their mean"
)
_CONSTANT = (
    "the loss of a batch must be the mean of the losses of its samples. Received: {name}, whose sum over ranks is that "
    "of the whole batch: it is divided by a constant, such as the global batch size. Divide it by the number of the "
    "rank's samples, or pass op='sum' to DistributedOptimizer"
)
_TAPE = (
    "gradients must be means over the samples of a batch. Received: the gradient of {name}, which differs by {share} "
    "although the loss does not. Take the gradient of a loss that is a mean over samples, or average it by "
    "hvdtrain.average"
)


@dataclasses.dataclass
class _Noted:
    """What a step has computed, in order."""

    outputs: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)
    """Of layers, by their paths."""
    losses: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    gradients: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)
    """As tapes return them, by the paths of variables."""


@contextlib.contextmanager
def noted_places() -> Iterator[_Noted]:
    """In the block, what a step computes is noted."""
    noted = _Noted()
    additional = keras_internals.ADDITIONAL_LOSS
    own: dict[str, Callable[..., Any]] = {
        "layer": keras.layers.Layer.__call__,
        "loss": keras.losses.Loss.__call__,
        "additional": additional.of(keras.Model),
        "gradient": tf.GradientTape.gradient,
    }

    def call_layer(layer: Any, *arguments: Any, **named: Any) -> Any:
        outputs = own["layer"](layer, *arguments, **named)
        if tf.executing_eagerly():
            for each in keras.tree.flatten(outputs):
                if tf.is_tensor(each) and isinstance(each, tf.Tensor) and each.dtype.is_floating:
                    noted.outputs.append((layer.path, np.asarray(tf.cast(each, tf.float32))))
        return outputs

    def call_loss(loss: Any, *arguments: Any, **named: Any) -> Any:
        return _note_loss(f"loss {loss.name!r}", own["loss"](loss, *arguments, **named))

    def call_additional(model: Any, loss: Any) -> Any:
        return _note_loss("a loss of add_loss, or a regularizer", own["additional"](model, loss))

    def _note_loss(name: str, value: Any) -> Any:
        if tf.executing_eagerly() and np.ndim(value) == 0:
            noted.losses.append((name, float(value)))
        return value

    def call_gradient(tape: Any, target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
        gradients = own["gradient"](tape, target, sources, *arguments, **named)
        if tf.executing_eagerly():
            total = sum(float(tf.reduce_sum(each)) for each in tf.nest.flatten(target) if each is not None)
            noted.losses.append(("the loss of which the tape takes the gradient", total))
            for source, each in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=False):
                if isinstance(each, tf.Tensor) and isinstance(source, keras.Variable | tf.Variable):
                    path = getattr(source, "path", source.name)
                    noted.gradients.append((path, np.asarray(tf.cast(each, tf.float32))))
        return gradients

    with contextlib.ExitStack() as stack:
        stack.callback(replace_method(keras.layers.Layer, "__call__", call_layer))
        stack.callback(replace_method(keras.losses.Loss, "__call__", call_loss))
        stack.callback(replace_method(keras.Model, additional.name, call_additional))
        stack.callback(replace_method(tf.GradientTape, "gradient", call_gradient))
        yield noted


def first_place(
    whole: _Noted, part: _Noted, rows: Rows, collectives: Collectives, *, epsilon: float, sums: bool
) -> str | None:
    """Says where the first difference is, and what to do; None if there is none before the update.

    All ranks must call it.

    Args:
        epsilon: the rounding of one operation.
        sums: whether the losses of ranks are added up, not averaged.
    """
    # A loss is one number, a mean: it has less rounding, and may differ by little where its gradient differs by much.
    of_tensors, of_losses = float(np.sqrt(epsilon)), epsilon ** (2 / 3)
    own = _first_output(whole, part, rows, of_tensors)
    shape = [len(part.losses), *(each.size for _, each in part.gradients)]
    everyone = collectives.allgather((own, shape))
    first = min((found for found, _ in everyone if found is not None), default=None)
    if first is not None:
        _, name, share = first
        return _FORWARD.format(name=repr(name), share=_percent(share))
    if any(each != everyone[0][1] for _, each in everyone):
        return None
    factor = 1.0 if sums else rows.share
    own_losses = np.array([value for _, value in part.losses])
    of_sum, losses, *gradients = collectives.sum(
        [own_losses, own_losses * factor, *(each * np.float32(factor) for _, each in part.gradients)]
    )
    for (name, value), mine, total in zip(whole.losses, losses, of_sum, strict=False):
        if _differs(mine, value, of_losses):
            text = _LOSS if _differs(total, value, of_losses) else _CONSTANT
            return text.format(name=name, share=_percent(_share(mine, value)))
    for (path, gradient), mine in zip(whole.gradients, gradients, strict=False):
        if _differs(mine, gradient, of_tensors):
            return _TAPE.format(name=repr(path), share=_percent(_share(mine, gradient)))
    return None


def _differs(mine: Any, value: Any, tolerance: float) -> bool:
    share = _share(mine, value)
    return share is not None and share > tolerance


def _first_output(whole: _Noted, part: _Noted, rows: Rows, tolerance: float) -> tuple[int, str, float] | None:
    for i, ((path, mine), (other, value)) in enumerate(zip(part.outputs, whole.outputs, strict=False)):
        if path != other or mine.ndim != value.ndim:
            return None
        differing = [axis for axis in range(mine.ndim) if mine.shape[axis] != value.shape[axis]]
        if len(differing) > 1:
            continue
        if differing:
            axis = differing[0]
            place = rows.part_of(value.shape[axis], mine.shape[axis])
            if place is None:
                continue
            value = value.take(range(place.start, place.stop), axis=axis)
        elif mine.ndim == 0:
            continue
        share = _share(mine, value)
        if share is not None and share > tolerance:
            return i, path, share
    return None


def _share(mine: Any, value: Any) -> float | None:
    if np.shape(mine) != np.shape(value):
        return None
    scale = float(np.linalg.norm(value))
    size = float(np.linalg.norm(np.asarray(mine, np.float64) - value))
    return size / scale if scale else None


def _percent(share: float | None) -> str:
    assert share is not None
    return f"{share:.2g}" if share < 0.01 else f"{share:.1%}"
