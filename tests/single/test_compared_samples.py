"""Whether ranks have divided the samples of model.fit; the ranks are those of one process here."""

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from hvdtrain.distributed import noted_samples
from hvdtrain.training.equality.compared_samples import overlap_of

NUMBER = 1200
IMAGES = np.zeros((NUMBER, 30, 30), np.uint8)
IMAGES[:, 10:20, 10:20] = np.random.default_rng(1).integers(256, size=(NUMBER, 10, 10))
FEATURES = np.random.default_rng(2).normal(size=(NUMBER, 5)).astype(np.float32)
LABELS = np.arange(NUMBER) % 10
TEXTS = np.array([f"text {number}" for number in range(NUMBER)])


def dataset(chosen):
    return tf.data.Dataset.from_tensor_slices((FEATURES[chosen], LABELS[chosen])).shuffle(99).repeat().batch(32)


DATA = {
    "arrays": lambda chosen: {"x": FEATURES[chosen], "y": LABELS[chosen]},
    "images": lambda chosen: {"x": IMAGES[chosen], "y": LABELS[chosen]},
    "texts": lambda chosen: {"x": TEXTS[chosen], "y": LABELS[chosen]},
    "text tensors": lambda chosen: {"x": tf.constant(TEXTS[chosen]), "y": LABELS[chosen]},
    "several inputs": lambda chosen: {"x": {"a": FEATURES[chosen], "b": [TEXTS[chosen]]}},
    "a table": lambda chosen: {"x": pd.DataFrame({"a": FEATURES[chosen, 0], "b": TEXTS[chosen]})},
    "a data set": lambda chosen: {"x": dataset(chosen)},
}


def overlap(*everyone):
    noted = []
    for arguments in everyone:
        with noted_samples.samples_noted(arguments):
            noted.append(noted_samples.take())
            assert noted_samples.take() is None
    return overlap_of(noted)


@pytest.mark.parametrize("size", [2, 5, 64])
@pytest.mark.parametrize("kind", DATA)
def test_parts_of_orders_that_differ(kind, size):
    random = np.random.default_rng(3)
    same = random.permutation(NUMBER)
    assert overlap(*[DATA[kind](same[rank::size]) for rank in range(size)]) is None
    text = overlap(*[DATA[kind](random.permutation(NUMBER)[rank::size]) for rank in range(size)])
    assert "the ranks' parts of the data overlap" in text
    # Of samples in a part, those in another one: two halves have a third of their union in common.
    assert size != 2 or 0.25 < int(text.partition("%")[0].split()[-1]) / 100 < 0.42


@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_not_divided(kind):
    everyone = [DATA[kind](np.random.default_rng(rank).permutation(NUMBER)) for rank in range(3)]
    text = overlap(*everyone)
    assert text.startswith("every rank trains on all of the 1,200 samples")
    assert "3 ranks make 3 times" in text


def test_samples_that_occur_often_are_in_all_parts():
    often = np.random.default_rng(4).integers(3, size=(NUMBER, 4))
    assert overlap(*[{"x": often[rank::4]} for rank in range(4)]) is None
    # Pairs of equal samples: two of three are divided between the parts of four ranks.
    pairs = np.concatenate([FEATURES[:600], FEATURES[:600]])[np.random.default_rng(5).permutation(NUMBER)]
    assert overlap(*[{"x": pairs[rank::4]} for rank in range(4)]) is None
    assert overlap(*[{"x": np.ones((99, 4))} for _ in range(2)]) is None


def test_a_few_equal_samples_are_no_overlap():
    parts = [FEATURES[:600], FEATURES[596:]]
    assert overlap(*[{"x": part} for part in parts]) is None
    assert overlap({"x": FEATURES[:9]}, {"x": FEATURES[8:17]}) is None


@pytest.mark.parametrize(
    "take_part",
    [
        lambda whole: whole.shard(2, 0),
        lambda whole: whole.take(100),
        lambda whole: whole.filter(lambda x, y: y > 3),
        lambda whole: whole.map(lambda x, y: x).window(3).flat_map(lambda window: window),
        lambda whole: tf.data.Dataset.range(3),
        lambda whole: tf.data.Dataset.from_tensor_slices(tf.sparse.eye(NUMBER)),
        lambda whole: FEATURES.tolist(),
        lambda whole: np.empty((0, 5)),
        lambda whole: np.memmap,
    ],
)
def test_what_a_rank_has_of_other_data_is_not_known(take_part, tmp_path):
    data = take_part(dataset(slice(None)).unbatch())
    if data is np.memmap:
        np.save(tmp_path / "x.npy", FEATURES)
        data = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert overlap({"x": data}, {"x": data}) is None


def test_too_many_samples_are_not_compared(monkeypatch):
    monkeypatch.setattr(noted_samples, "_MAX_SAMPLES", NUMBER - 1)
    assert overlap({"x": FEATURES}, {"x": FEATURES}) is None
    assert overlap({"x": FEATURES[1:]}, {"x": FEATURES[1:]}) is not None


def test_a_rank_whose_samples_are_not_known():
    assert overlap({"x": FEATURES}, {"x": FEATURES.tolist()}) is None
