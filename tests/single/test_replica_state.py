"""What replicas share other than variables, with the collectives of two ranks simulated in one process."""

import inspect
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.backend.common.global_state import set_global_attribute
from made_up_jobs import ThreadCollectives, on_threads
from packaging import version

import hvdtrain
from hvdtrain.distributed.adapted_layers import require_equal_adapted_layers, share_adapted_layers
from hvdtrain.distributed.replica_consistency import broadcast, require_equal_replicas
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DivergenceError

hvdtrain.init()


class Rank(SingleProcessCollectives):
    """One of two ranks that receives nothing."""

    size = 2


class PicklingCollectives(ThreadCollectives):
    """Hands over copies, as between processes."""

    def allgather(self, value):
        return super().allgather(pickle.loads(pickle.dumps(value)))


def pair(function, models) -> None:
    """Calls a function for the models of rank 0 and of rank 1, each on a thread; raises the error of a rank."""
    results = on_threads(2, lambda collectives: function(models[collectives.rank], collectives), PicklingCollectives)
    for result in results:
        if result is not None:
            raise result


class Scale(layers.Layer):
    """A layer of a user's own with an array that adapt sets."""

    scale = None

    def adapt(self, data):
        self.scale = float(np.max(data))
        self.table = np.unique(data)[:3]

    def call(self, inputs):
        return inputs * self.scale + self.table[0]


NUMBERS = np.arange(24, dtype=np.float32).reshape(12, 2)
INTEGERS = np.arange(6)[:, None]
WORDS = np.array([f"word{i % 5}" for i in range(12)])


def adapted(layer, data):
    layer.adapt(data)
    return keras.Sequential([layers.Input(data.shape[1:], dtype=layer_dtype(data)), layer])


def layer_dtype(data) -> str:
    return "string" if data.dtype.kind == "U" else str(data.dtype)


ADAPTABLE = [
    (layers.Normalization, NUMBERS, NUMBERS + 5, NUMBERS),
    (lambda: layers.Discretization(num_bins=4), NUMBERS, NUMBERS**2, NUMBERS),
    (layers.StringLookup, WORDS[:, None], np.array([["other"], ["word2"]]), WORDS[:, None]),
    (
        lambda: layers.IntegerLookup(output_mode="multi_hot"),
        np.arange(6)[:, None],
        np.arange(6)[:, None] * 2,
        np.arange(6)[:, None],
    ),
    (lambda: layers.TextVectorization(output_sequence_length=3), WORDS, np.array(["other word2"]), WORDS[:, None]),
    (lambda: layers.TextVectorization(output_mode="tf_idf"), WORDS, np.array(["x word2", "y z word3"]), WORDS[:, None]),
    (Scale, NUMBERS, NUMBERS * 3, NUMBERS),
]


@pytest.mark.parametrize(("make", "data", "other", "inputs"), ADAPTABLE, ids=lambda each: getattr(each, "__name__", ""))
def test_adapted_layers_compute_as_rank_0s(make, data, other, inputs, capsys):
    models = [adapted(make(), data), adapted(make(), other)]
    expected, before = (np.asarray(model(inputs)) for model in models)
    assert not np.array_equal(expected, before)
    with pytest.raises(DivergenceError, match=r"At step 7 .* of layer .* of rank 1 differs"):
        pair(lambda model, collectives: require_equal_adapted_layers(model, collectives, 7), models)
    capsys.readouterr()
    pair(share_adapted_layers, models)
    told = capsys.readouterr().err
    assert told.count("to different data") == told.count(f"ranks have adapted {models[0].layers[-1].name!r}") == 1
    pair(lambda model, collectives: require_equal_adapted_layers(model, collectives, 7), models)
    pair(share_adapted_layers, models)
    assert "to different data" not in capsys.readouterr().err
    np.testing.assert_array_equal(np.asarray(models[0](inputs)), expected)
    np.testing.assert_array_equal(np.asarray(models[1](inputs)), expected)
    np.testing.assert_array_equal(np.asarray(tf.function(models[1])(tf.constant(inputs))), expected)
    models[1].layers[-1].adapt(data)
    np.testing.assert_array_equal(np.asarray(models[1](inputs)), expected)


def random_layers() -> list[str]:
    """The layers that Keras ships that take a seed."""
    members = [(name, each) for name, each in vars(layers).items() if inspect.isclass(each)]
    names = {name for name, each in members if "seed" in inspect.signature(each.__init__).parameters}
    return sorted(names - {"JaxLayer"})  # needs JAX


# By the names of their parameters: whatever makes a layer draw.
DRAWS = {"rate": 0.5, "stddev": 1.0, "dropout": 0.5, "factor": 0.5, "x_factor": 0.5, "y_factor": 0.5}
DRAWS |= {
    "brightness_factor": 0.5,
    "height_factor": 0.3,
    "width_factor": 0.3,
    "height": 4,
    "width": 4,
    "addition_factor": 1.0,
}
SIZES = {"units": 4, "filters": 2, "kernel_size": 2, "num_heads": 2, "key_dim": 2, "head_dim": 2}
SIZES |= {"num_query_heads": 2, "num_key_value_heads": 2}


def drawing_layer(name: str) -> layers.Layer:
    kind = getattr(layers, name)
    parameters = inspect.signature(kind.__init__).parameters
    sizes = {} if name.startswith("RandomGaussianBlur") else SIZES
    arguments = {key: value for key, value in {**DRAWS, **sizes}.items() if key in parameters}
    return kind(**arguments | ({"factor": (1, 8)} if name == "RandomPosterization" else {}))


def drawing_model(name: str) -> keras.Model:
    layer = drawing_layer(name)
    if "Attention" in name:
        inputs = layers.Input((5, 4))
        outputs = layer([inputs, inputs]) if name in ("Attention", "AdditiveAttention") else layer(inputs, inputs)
        return keras.Model(inputs, outputs)
    if name.endswith("Cell"):
        return keras.Sequential([layers.Input((5, 3)), layers.RNN(layer)])
    if name in ("LSTM", "GRU", "SimpleRNN"):
        shape: tuple = (5, 3)
    elif name.startswith(("ConvLSTM", "SpatialDropout")):
        shape = (6,) * int(name[-2]) + (3,)
        shape = (4, *shape) if name.startswith("ConvLSTM") else shape
    else:
        shape = (16, 16, 3) if "Dropout" not in name and "Noise" not in name else (8,)
    return keras.Sequential([layers.Input(shape), layer])


class Noise(layers.Layer):
    """A layer of a user's own that draws from Keras' global generator."""

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def drawn(make, rank: int | None) -> np.ndarray:
    """What a model computes after a broadcast; without one for None."""
    set_global_attribute("global_seed_generator", None)  # Keras 3.12 would keep it.
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(optimizer="sgd")
    if rank is not None:
        broadcast(model, collectives=Rank(rank))
    x = tf.random.stateless_uniform((4, *model.input_shape[1:]), [1, 2], maxval=255.0)
    return np.stack([np.asarray(model(x, training=True)) for _ in range(4)])


@pytest.mark.parametrize("name", [*random_layers(), "Noise"])
def test_ranks_draw_differently(name):
    if name in ("RandAugment", "RandomGrayscale") and version.parse(keras.__version__) < version.parse("3.12"):
        pytest.skip("before Keras 3.12, it draws without a seed generator, or cannot be called")

    def make():
        return keras.Sequential([layers.Input((8,)), Noise()]) if name == "Noise" else drawing_model(name)

    plain, first, second = (drawn(make, rank) for rank in (None, 0, 1))
    assert not np.array_equal(first[0], first[1]) or not np.array_equal(first[1], first[2]), "it draws nothing"
    np.testing.assert_array_equal(first, plain)
    assert not np.array_equal(second, first)


def test_vocabularies_of_different_sizes_are_refused():
    models = [adapted(layers.StringLookup(output_mode="multi_hot"), data) for data in (WORDS[:, None], WORDS[:3, None])]
    with pytest.raises(
        DivergenceError, match=r"number of words .* 5 on rank 0, 3 on rank 1\. Adapt it on the same data"
    ):
        pair(share_adapted_layers, models)


def test_adapted_layers_are_part_of_the_comparison_of_replicas():
    models = [adapted(Scale(), NUMBERS + rank) for rank in range(2)]
    with pytest.raises(DivergenceError, match="At step 5 scale of layer"):
        pair(lambda model, collectives: require_equal_replicas(model, collectives, 5), models)
