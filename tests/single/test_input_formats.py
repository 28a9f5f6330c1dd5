"""Tables and image folders in their real formats: they train as the same samples in arrays."""

import json
import os
import shutil

import datasets
import keras
import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays, ImageFolder, RandomAccess, Table, evaluation_dataset
from hvdtrain.errors import DataError, UsageError

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 3)).astype(np.float32), RNG.integers(0, 3, 50).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, 50).astype(np.float32)
WORDS = [("yes", "no", "maybe")[label] for label in Y]
COLUMNS = {"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "label": Y, "weight": WEIGHTS, "word": WORDS}
ROWS = pyarrow.table({**COLUMNS, "vector": pyarrow.array(list(X))})
OPTIONS = {"x": ["a", "b", "c"], "y": "label", "sample_weight": "weight"}


def trained(source, **options) -> list[bytes]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((3,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    summary = make_trainer(model, source, source, **{"batch_size": 16, "epochs": 2, **options}).fit()
    return [summary["eval"], *(variable.numpy().tobytes() for variable in model.weights)]


def content(source, batch_size: int = 7) -> list:
    return [tf.nest.map_structure(lambda each: each.numpy().tolist(), batch) for batch in batches(source, batch_size)]


def batches(source, batch_size: int):
    return evaluation_dataset(source, batch_size, rank=0, size=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The table in each kind of file; as Parquet also in two parts."""
    folder = tmp_path_factory.mktemp("tables")
    pyarrow.parquet.write_table(ROWS, folder / "all.parquet")
    pyarrow.parquet.write_table(ROWS.slice(0, 20), folder / "0.parquet")
    pyarrow.parquet.write_table(ROWS.slice(20), folder / "1.parquet")
    for suffix in ("arrow", "feather"):
        with (
            pyarrow.OSFile(str(folder / f"all.{suffix}"), "wb") as file,
            pyarrow.ipc.new_file(file, ROWS.schema) as out,
        ):
            out.write_table(ROWS, max_chunksize=16)
    pyarrow.csv.write_csv(ROWS.drop_columns(["vector"]), folder / "all.csv")
    return folder


@pytest.mark.slow
def test_tables_train_as_arrays(files):
    hugging_face = datasets.Dataset(ROWS)
    mixed = np.random.default_rng(1).permutation(50)
    tables = {
        "parquet": files / "all.parquet",
        "parts": [files / "0.parquet", str(files / "1.parquet")],
        "arrow": files / "all.arrow",
        "feather": str(files / "all.feather"),
        "pyarrow": ROWS,
        "pandas": pandas.DataFrame(COLUMNS),
        "datasets": hugging_face,
        "a selection": hugging_face.select(mixed).select(np.argsort(mixed)),
    }
    expected = trained(Arrays(X, Y, WEIGHTS))
    for name, table in tables.items():
        assert trained(Table(table, **OPTIONS)) == expected, name
    assert trained(Table(ROWS, x="vector", y="label", sample_weight="weight")) == expected
    assert trained(Arrays(X, Y)) == trained(Table(ROWS, x="vector", y="label")) != expected
    # Numbers of CSV files are float64 and int64; what they are stacked into is float32.
    read = Table(files / "all.csv", **OPTIONS)
    np.testing.assert_allclose(np.concatenate([batch[0] for batch in batches(read, 16)]), X, rtol=1e-6)


def test_named_inputs_and_strings():
    source = Table(ROWS, x={"number": "a", "text": "word", "list": "vector"}, y="label")
    first = content(source, 2)[0]
    assert first[0] == {"number": X[:2, 0].tolist(), "text": [w.encode() for w in WORDS[:2]], "list": X[:2].tolist()}
    assert content(Table(ROWS, x="word"), 50)[0] == [word.encode() for word in WORDS]
    images = pyarrow.table({"image": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]})
    assert content(Table(images, x="image"), 2)[0] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_rows_with_missing_values_are_bad_samples():
    values: list = X.tolist()
    values[30] = None
    values[31] = [1.0, 2.0]
    table = pyarrow.table({"x": pyarrow.array(values), "y": Y})
    assert [each.number for each in Table(table, x="x", y="y").find_bad(np.arange(50))] == [30, 31]
    with pytest.raises(
        DataError, match=r"row 31: all rows must have the same shapes\. Received: \(2,\), \(3,\) in the first"
    ):
        trained(Table(table, x="x", y="y"))
    trained(Table(table, x="x", y="y"), bad_samples=2)


def test_a_missing_number_is_not_read_as_another():
    """NumPy would make NaN of it, and of that an integer."""
    table = pyarrow.table({"x": X[:, 0], "y": pyarrow.array([0, 1, None, 2], mask=[False] * 4).take(list(Y % 4))})
    missing = np.flatnonzero(Y % 4 == 2)
    assert [each.number for each in Table(table, x="x", y="y").find_bad(np.arange(50))] == missing.tolist()


def test_dtypes_are_those_of_the_table():
    table = pyarrow.table({"x": pyarrow.array(list(X)), "y": Y.astype(np.uint8), "weight": WEIGHTS.astype(np.float64)})
    x, y, weight = next(iter(batches(Table(table, x="x", y="y", sample_weight="weight"), 4)))[:3]
    assert [each.dtype for each in (x, y, weight)] == [tf.float32, tf.uint8, tf.float32]
    for lists in ([[1, 2], [3, None]], [[1.0, 2.0], [3.0, None]], [[[1.0]], [[None]]]):
        (bad,) = Table(pyarrow.table({"x": pyarrow.array(lists)}), x="x").find_bad(np.arange(2))
        assert (bad.number, bad.cause) == (1, "no value may be missing. Received: an empty value in column x")


def test_whole_numbers_that_a_matrix_of_floats_cannot_hold_are_bad_samples():
    table = pyarrow.table({"a": [1, 2**24 + 1, 3], "b": [0.5, 1.5, 2.5]})
    (bad,) = Table(table, x=["a", "b"]).find_bad(np.arange(3))
    assert bad.number == 1
    assert "Received: int64 in column a, with values that float32 cannot hold" in bad.cause


def test_rows_that_a_transform_makes():
    """Table would read them without the transform; one that fails is a bad sample."""

    def halved(rows):
        if -1 in rows["a"]:
            raise KeyError("no such file")
        return {"a": [value / 2 for value in rows["a"]]}

    rows = datasets.Dataset.from_dict({"a": [2, 4, -1, 8]}).with_transform(halved)
    with pytest.raises(UsageError, match=r"Received: one with a transform .*RandomAccess\(dataset, select\)"):
        Table(rows, x="a")
    source = RandomAccess(rows, select=lambda row: row["a"])
    (bad,) = source.find_bad(np.arange(4))
    assert (bad.number, bad.cause) == (2, "KeyError: 'no such file'")
    assert [source._one(number)[0] for number in (0, 1, 3)] == [1.0, 2.0, 4.0]


def test_a_row_that_cannot_be_read_for_any_reason_is_a_bad_sample(monkeypatch):
    table = Table(ROWS, x="a")
    take = table._rows.take

    def failing(numbers):
        if 3 in numbers:
            raise OSError("input/output error")
        return take(numbers)

    monkeypatch.setattr(table._rows, "take", failing)
    (bad,) = table.find_bad(np.arange(6))
    assert (bad.number, bad.cause) == (3, "input/output error")


def test_tables_that_cannot_be_read(files, tmp_path):
    with pytest.raises(UsageError, match=r"Received: labl, not in .*all\.parquet among a, b, c, label"):
        Table(files / "all.parquet", x="a", y="labl")
    with pytest.raises(UsageError, match="Received: labl, not among a, b"):
        Table(ROWS, x="a", y="labl")
    with pytest.raises(UsageError, match=r"must end in \.parquet, .*Received: .*table\.xls"):
        Table(tmp_path / "table.xls", x="a")
    with pytest.raises(UsageError, match=r"Received: dict.*RandomAccess"):
        Table({"a": [1]}, x="a")
    with pytest.raises(UsageError, match="sample_weight without y"):
        Table(ROWS, x="a", sample_weight="weight")
    with pytest.raises(DataError, match="at least one row"):
        Table(ROWS.slice(0, 0), x="a")
    for name in ("all.parquet", "all.arrow"):
        damaged = tmp_path / name
        damaged.write_bytes((files / name).read_bytes()[:-100])
        with pytest.raises(DataError, match=rf"{name} must be a whole"):
            Table(damaged, x="a")
    with pytest.raises(DataError, match=r"missing\.csv must be a whole"):
        Table(tmp_path / "missing.csv", x="a")
    assert Table(ROWS, x="a").facts() != Table(ROWS.slice(1), x="a").facts()
    assert json.dumps(Table(ROWS, **OPTIONS).facts()) == json.dumps(Table(files / "all.parquet", **OPTIONS).facts())


@pytest.fixture
def images(tmp_path):
    """10 images in 2 classes, and other files."""
    pixels = RNG.integers(0, 256, (10, 8, 6, 3)).astype(np.uint8)
    for i, each in enumerate(pixels):
        path = tmp_path / ("cats", "dogs")[i % 2] / ("", "more")[i // 5] / f"{i}.{('png', 'PNG')[i % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(each).numpy())
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    (tmp_path / "a.png").write_text("in no class")
    return tmp_path


def test_image_folders_are_read_as_keras_reads_them(images):
    (images / "a.png").unlink()
    ours = ImageFolder(images, image_size=(4, 4))
    assert (ours.num_samples, ours.class_names) == (10, ["cats", "dogs"])
    theirs = keras.utils.image_dataset_from_directory(images, image_size=(4, 4), shuffle=False, batch_size=None)
    expected = {(x.numpy().tobytes(), int(y)) for x, y in theirs}
    read = [(x[i].numpy().tobytes(), int(y[i])) for x, y, *_ in batches(ours, 3) for i in range(len(y))]
    assert len(read) == len(set(read)) == 10
    assert set(read) == expected
    facts = ours.facts()
    assert ImageFolder(images, image_size=(4, 4), channels=1).facts() == facts
    (images / "cats" / "0.png").write_bytes((images / "dogs" / "1.PNG").read_bytes())
    assert ImageFolder(images, image_size=(4, 4)).facts() != facts


def test_images_that_cannot_be_decoded_are_bad_samples(images):
    source = ImageFolder(images, image_size=(4, 4))
    broken = images / "dogs" / "1.PNG"
    broken.write_bytes(broken.read_bytes()[:40])
    (bad,) = source.find_bad(np.arange(10))
    assert bad.where == str(broken)
    assert bad.number == 5  # after 5 cats


def test_names_that_are_no_text_links_to_nowhere_and_folders_with_names_of_images(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other") / "images"
    shutil.copytree(images, folder)
    one = next(each for each in folder.glob("*/*.png"))
    strange = os.fsencode(one.parent) + b"/caf\xe9.png"
    shutil.copy(os.fsencode(one), strange)
    (one.parent / "zz.jpg").symlink_to("/nowhere")
    (one.parent / "folder.jpg").mkdir()
    before, source = ImageFolder(images, image_size=(4, 4)), ImageFolder(folder, image_size=(4, 4))
    assert source.num_samples == before.num_samples + 2
    source.facts()
    (bad,) = {each.where for each in source.find_bad(np.arange(source.num_samples))} - {
        each.where.replace(str(images), str(folder)) for each in before.find_bad(np.arange(before.num_samples))
    }
    assert bad.endswith("/zz.jpg")


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "cats").mkdir()
    with pytest.raises(DataError, match="with 1 subfolders and no such file"):
        ImageFolder(tmp_path)
    with pytest.raises(UsageError, match=r"channels must be 1, 3 or 4\. Received: 2"):
        ImageFolder(tmp_path, channels=2)
    with pytest.raises(UsageError, match=r"image_size must be .*Received: \(0, 4\)"):
        ImageFolder(tmp_path, image_size=(0, 4))


def test_samples_are_selected_from_records():
    records = [{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]
    source = RandomAccess(records, select=lambda record: (record["image"], record["label"]))
    assert trained(source) == trained(Arrays(X, Y))
