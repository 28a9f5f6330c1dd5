"""Event files, read back with TensorBoard's own reader."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.loggers.reporter import Reporter, RunShape
from hvdtrain.loggers.tensorboard import TensorBoardReporter

SHAPE = RunShape(total_steps=40, steps_per_epoch=16)
VALUES = {"loss": 0.25, "accuracy": 0.9, "learning_rate": 0.1, "gradient_norm": 2.5, "examples/s": 1234.5}
SUMMARY = {"steps": 40, "ranks": 2, "wall_seconds": 3.14, "eval": {}, "weights_sha256": "abc"}


class WarningRecorder(Reporter):
    """Records warnings."""

    def __init__(self) -> None:
        self.warnings: list[tuple[int, str]] = []

    def warned(self, step, text):
        self.warnings.append((step, text))


def read_back(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def scalars(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]


def test_tensorboard_reads_every_scalar(tmp_path):
    folder = tmp_path / "no [pattern\\" / "tb"
    reporter = TensorBoardReporter(folder)
    assert not folder.exists()
    for step in (10, 20, 30):
        reporter.progressed(step, {**VALUES, "loss": 1 / step, "s/batch": 0.5})
    for step in (16, 32):
        reporter.evaluated(step, {"loss": 2 / step})
    reporter.finished(SUMMARY)
    train, evaluation = read_back(folder / "train"), read_back(folder / "eval")
    assert scalars(train, "loss") == [(step, np.float32(1 / step)) for step in (10, 20, 30)]
    names = {"accuracy": 0.9, "learning_rate": 0.1, "gradient_norm": 2.5, "examples_per_second": 1234.5}
    for name, value in {**names, "seconds_per_batch": 0.5}.items():
        assert scalars(train, name) == [(step, np.float32(value)) for step in (10, 20, 30)]
    assert set(train.Tags()["tensors"]) == {"loss", "seconds_per_batch", *names}
    assert scalars(evaluation, "loss") == [(step, 2 / step) for step in (16, 32)]
    assert evaluation.Tags()["tensors"] == ["loss"]
    reporter.close()
    reporter.close()


HISTOGRAMS = {
    "normal": np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32),
    "constant": np.full(7, 0.3, np.float32),
    "one": np.array(5.0),
    "half": np.array([-1, 0, 65504], np.float16),
    "integers": np.arange(10),
    "tiny": np.array([1.0, np.nextafter(1.0, 2.0)]),
    "not finite": np.array([1, np.nan, 3, np.inf, -np.inf]),
    "nothing finite": np.array([np.nan]),
    "empty": np.zeros((0, 3)),
}


def test_tensorboard_reads_every_histogram(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    for step in (5, 10):
        reporter.histograms(step, {"weights": HISTOGRAMS, "gradients": {"normal": 100 * HISTOGRAMS["normal"]}})
    reporter.close()
    events = read_back(tmp_path / "train")
    assert set(events.Tags()["tensors"]) == {"gradients/normal", *(f"weights/{name}" for name in HISTOGRAMS)}
    expected = {f"weights/{name}": values for name, values in HISTOGRAMS.items()}
    for name, values in {**expected, "gradients/normal": 100 * HISTOGRAMS["normal"]}.items():
        assert events.SummaryMetadata(name).plugin_data.plugin_name == "histograms"
        assert [event.step for event in events.Tensors(name)] == [5, 10]
        buckets = tf.make_ndarray(events.Tensors(name)[0].tensor_proto)
        finite = values[np.isfinite(values)].astype(float)
        assert buckets.shape == (30, 3)
        assert buckets[:, 2].sum() == finite.size
        if finite.size:
            assert (buckets[0, 0], buckets[-1, 1]) == (finite.min(), finite.max())
    counts, edges = np.histogram(HISTOGRAMS["normal"].astype(float), bins=30)
    buckets = tf.make_ndarray(events.Tensors("weights/normal")[0].tensor_proto)
    np.testing.assert_allclose(buckets, np.stack([edges[:-1], edges[1:], counts], axis=1), atol=1e-12)


def sequential() -> keras.Model:
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="second")]
    )


def functional(nest: type) -> keras.Model:
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b", dtype="int32")
    first = keras.layers.Dense(2, name="first")(a)
    second = keras.layers.Flatten()(keras.layers.Embedding(5, 2, name="second")(b))
    outputs = keras.layers.Concatenate()([first, second])
    # Not in the order of names: inputs that are swapped have the wrong shapes.
    return keras.Model({"b": b, "a": a} if nest is dict else [b, a], outputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="second")

    def call(self, inputs):
        return self.second(self.first(inputs["a"] + inputs["b"]))


def subclassed() -> keras.Model:
    model = Subclassed()
    model({"a": np.ones((4, 3)), "b": np.ones((4, 3))})
    return model


@pytest.mark.parametrize(
    "make",
    [sequential, lambda: functional(list), lambda: functional(dict), subclassed],
    ids=["sequential", "list", "dict", "subclassed"],
)
def test_tensorboard_reads_the_graph(tmp_path, make, recwarn):
    console = WarningRecorder()
    reporter = TensorBoardReporter(tmp_path, console)
    reporter.model_built(make())
    reporter.close()
    assert console.warnings == []
    assert not recwarn.list
    graph = tf.compat.v1.GraphDef.FromString(read_back(tmp_path / "train").Graph().SerializeToString())
    scopes = {part for node in graph.node for part in node.name.split("/")}
    # TensorFlow numbers repeated scopes.
    for name in ("first", "second"):
        assert any(re.fullmatch(rf"{name}(_\d+)?", scope) for scope in scopes), scopes
    assert any(node.op == "MatMul" for node in graph.node)


class Untraceable(keras.Model):
    def call(self, inputs):
        return inputs.numpy()


def test_a_model_that_cannot_be_traced_has_no_graph(tmp_path):
    unknown = Subclassed()
    untraceable = Untraceable()
    untraceable(np.ones((4, 3)))
    console = WarningRecorder()
    reporter = TensorBoardReporter(tmp_path, console)
    for model in (unknown, untraceable):
        reporter.model_built(model)
    reporter.progressed(10, VALUES)
    reporter.close()
    assert [step for step, _ in console.warnings] == [0, 0]
    assert all("TensorBoard shows no graph" in text for _, text in console.warnings)
    assert scalars(read_back(tmp_path / "train"), "accuracy") == [(10, np.float32(0.9))]
