"""Logs a run to event files for TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from hvdtrain.loggers.reporter import Reporter
from hvdtrain.seams import keras_internals

# TensorBoard groups scalars by the part of the name before a slash.
_NAMES = {"examples/s": "examples_per_second", "s/batch": "seconds_per_batch"}
_BUCKETS = 30


class TensorBoardReporter(Reporter):
    """Writes scalars, histograms and the model's graph to the subfolders ``train`` and ``eval``.

    Training and evaluation values have the same names, so that TensorBoard draws both in one chart.

    Args:
        folder: created at the first event.
        console: receives a warning if the model cannot be traced.
    """

    def __init__(self, folder: Path, console: Reporter | None = None):
        self._folder = folder
        self._console = console or Reporter()
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._is_profiling = False

    def model_built(self, model: keras.Model) -> None:
        try:
            graph = _inference_graph(model)
        except Exception as error:
            # Runs the model's own code only to draw a graph: no error in it may end training.
            self._console.warned(
                0,
                "TensorBoard shows no graph: call() must be traceable with the shapes that the model was built with. "
                f"Received: {type(error).__name__}",
            )
            return
        with self._writer("train").as_default():
            tf.summary.graph(graph)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._write_scalars("train", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._write_scalars("eval", step, values)

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._write_scalars("members", step, values)

    def histograms(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        with self._writer("train").as_default(step):
            for group, arrays in groups.items():
                for path, array in arrays.items():
                    _write_histogram(f"{group}/{path}", array)

    def profile_begins(self) -> None:
        if not self._is_profiling:
            tf.profiler.experimental.start(str(self._folder))
            self._is_profiling = True

    def profile_ends(self) -> None:
        if self._is_profiling:
            tf.profiler.experimental.stop()
            self._is_profiling = False

    def finished(self, summary: Mapping[str, Any]) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, run: str) -> tf.summary.SummaryWriter:
        if run not in self._writers:
            # The default queue holds ten values: each log step would wait for the disk.
            self._writers[run] = tf.summary.create_file_writer(
                str(self._folder / run), max_queue=1000, flush_millis=5000
            )
        return self._writers[run]

    def _write_scalars(self, run: str, step: int, values: Mapping[str, float]) -> None:
        # In one operation: tf.summary.scalar takes 0.5 ms per value, and all ranks wait for it.
        scalars = Summary()
        for name, value in values.items():
            scalars.MergeFrom(scalar_pb(_NAMES.get(name, name), value))
        with self._writer(run).as_default():
            tf.summary.experimental.write_raw_pb(scalars.SerializeToString(), step)


def _write_histogram(name: str, array: np.ndarray) -> None:
    # tf.summary.histogram needs 240 bytes per element.
    values = array.astype(np.float64).ravel()
    # TensorBoard does not draw histograms with NaN or infinity.
    values = values[np.isfinite(values)]
    buckets = np.zeros((_BUCKETS, 3))
    if values.size:
        low, high = values.min(), values.max()
        edges = np.linspace(low, high, _BUCKETS + 1)
        width = (high - low) / _BUCKETS
        last = _BUCKETS - 1
        positions = np.minimum((values - low) / width, last).astype(int) if width else np.full(values.size, last)
        buckets = np.stack([edges[:-1], edges[1:], np.bincount(positions, minlength=_BUCKETS)], axis=1)
    tf.summary.write(name, buckets, metadata=create_summary_metadata(display_name=None, description=None))


def _inference_graph(model: keras.Model) -> tf.Graph:
    function = tf.function(lambda inputs: model(inputs, training=False))
    return function.get_concrete_function(_input_specs(model)).graph


def _input_specs(model: keras.Model) -> Any:
    """Returns the structure of the model's inputs, for any batch size."""
    if isinstance(model, keras.Sequential):
        return _spec(model.inputs[0].shape, model.inputs[0].dtype)
    # The public attribute of a functional model is a flat list; its call may take a dict or a nested structure.
    inputs = keras_internals.INPUTS.of(model) if keras_internals.INPUTS.is_in(model) else None
    if inputs is not None:
        return keras.tree.map_structure(lambda each: _spec(each.shape, each.dtype), inputs)
    shapes = model.get_build_config()["input_shape"]
    return keras.tree.map_shape_structure(lambda shape: _spec(shape, model.input_dtype), shapes)


def _spec(shape: Sequence[int | None], dtype: str) -> tf.TensorSpec:
    return tf.TensorSpec((None, *shape[1:]), dtype)
