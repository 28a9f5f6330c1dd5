"""The built-in tasks: their readers accept and reject the right files, and their networks match the papers."""

import gzip
import struct

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import Arrays, Data, evaluation_dataset
from hvdtrain.errors import DataError, UsageError
from hvdtrain.tasks import cifar10, dlrm, mnist, sample_data, tables, tabular, text
from hvdtrain.tasks.handwritten_digits import load_digits
from hvdtrain.tasks.loading import load_task
from hvdtrain.tasks.names import BUILT_IN, short_name
from hvdtrain.tasks.task import Task

NO_DATA = Data(Arrays(np.zeros((1, 1))))


def samples(source, count=None):
    """All samples of a source, or the first few, as one batch."""
    return next(iter(evaluation_dataset(source, count or source.num_samples, rank=0, size=1)))


# Digits.


def test_the_digits_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = load_digits()
    expected = sklearn.load_digits()
    assert images.dtype == labels.dtype == np.uint8
    assert np.array_equal(images, expected.images)
    assert np.array_equal(labels, expected.target)


# CIFAR-10.


def record(label: int, red: int, green: int, blue: int) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def write_cifar10(folder, training: bytes, test: bytes = record(3, 1, 2, 3)):
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir(exist_ok=True)
    (batches / "data_batch_1.bin").write_bytes(training)
    (batches / "test_batch.bin").write_bytes(test)
    return folder


def test_cifar10_reads_a_label_and_three_planes(tmp_path):
    second = bytearray(record(9, 10, 20, 30))
    second[1 + 32 * 5 + 7] = 200  # red, row 5, column 7
    second[1 + 2048 + 31] = 100  # blue, row 0, column 31
    folder = write_cifar10(tmp_path, record(0, 1, 2, 3) + bytes(second))
    training = cifar10.read_data(folder).training
    images, labels = training.x, training.y
    assert labels.tolist() == [0, 9]
    assert images.shape == (2, 32, 32, 3)
    assert images[0, 4, 4].tolist() == [1, 2, 3]
    assert images[1, 5, 7].tolist() == [200, 20, 30]
    assert images[1, 0, 31].tolist() == [10, 20, 100]
    assert images[1, 7, 5].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (record(1, 0, 0, 0)[:-1], r"records of 3073 bytes.*data_batch_1.bin, which has 3072 bytes at offset 0"),
        (record(1, 0, 0, 0) + b"12", r"2 bytes at offset 3073"),
        (b"", r"data_batch_1.bin, which has 0 bytes at offset 0"),
        (record(1, 0, 0, 0) + record(10, 0, 0, 0), r"must be 0 to 9. Received: 10 at offset 3073 of .*\(image 1\)"),
    ],
)
def test_cifar10_errors_name_file_and_offset(content, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        cifar10.read_data(write_cifar10(tmp_path, content))
    assert caught.value.exit_code == 65


def test_cifar10_evaluates_the_standardised_central_crop(tmp_path):
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (3, 32, 32)).astype(np.uint8)
    folder = write_cifar10(tmp_path, record(0, 1, 2, 3), bytes([5]) + image.tobytes())
    x, y = samples(cifar10.read_data(folder).evaluation)
    middle = image.transpose(1, 2, 0)[4:28, 4:28].astype(np.float32)
    assert y.numpy().tolist() == [5]
    assert np.allclose(x[0], tf.image.per_image_standardization(middle), atol=1e-5)
    assert np.allclose(x[0], (middle - middle.mean()) / middle.std(), atol=1e-4)


def test_cifar10_standardises_a_uniform_image():
    assert np.all(cifar10.standardised(np.full((1, 24, 24, 3), 7, np.uint8)) == 0)


def test_cifar10_distortion_depends_only_on_the_seed():
    image = tf.constant(np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8))
    one, label = cifar10.distorted(image, tf.constant(4), tf.constant([1, 2]))
    again, _ = cifar10.distorted(image, tf.constant(4), tf.constant([1, 2]))
    other, _ = cifar10.distorted(image, tf.constant(4), tf.constant([1, 3]))
    assert one.shape == (24, 24, 3)
    assert int(label) == 4
    assert np.array_equal(one, again)
    assert not np.allclose(one, other)
    assert abs(float(tf.reduce_mean(one))) < 1e-4


def test_cifar10_has_the_network_of_the_tutorial():
    model = cifar10.make_model(NO_DATA)
    assert model.count_params() == 1_068_298
    shapes = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    assert shapes == {
        "conv1/kernel": (5, 5, 3, 64),
        "conv1/bias": (64,),
        "conv2/kernel": (5, 5, 64, 64),
        "conv2/bias": (64,),
        "local3/kernel": (2304, 384),
        "local3/bias": (384,),
        "local4/kernel": (384, 192),
        "local4/bias": (192,),
        "softmax_linear/kernel": (192, 10),
        "softmax_linear/bias": (10,),
    }
    biases = {name: float(model.get_layer(name).bias.numpy()[0]) for name in ("conv1", "conv2", "local3", "local4")}
    assert biases == pytest.approx({"conv1": 0.0, "conv2": 0.1, "local3": 0.1, "local4": 0.1})
    deviations = {name: float(model.get_layer(name).kernel.numpy().std()) for name in ("conv1", "local3")}
    # A normal distribution truncated at two standard deviations.
    assert deviations == pytest.approx({"conv1": 0.05 * 0.88, "local3": 0.04 * 0.88}, rel=0.05)


def test_cifar10_has_the_weight_decay_of_the_tutorial():
    """0.004 * sum(w^2) / 2 over the weights of the two large dense layers, and nothing else."""
    model = cifar10.make_model(NO_DATA)
    for variable in model.trainable_variables:
        variable.assign(tf.fill(variable.shape, 0.5))
    expected = 0.004 * 0.25 / 2 * (2304 * 384 + 384 * 192)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)


def test_cifar10_lrn_by_hand():
    x = np.zeros((1, 1, 1, 64), np.float32)
    x[0, 0, 0, :10] = [30, 0, 0, 0, 40, 0, 0, 0, 0, 50]
    result = np.asarray(cifar10.local_response_normalisation(tf.constant(x)))[0, 0, 0]
    # Channel 0 sees 0 to 4; channel 4 sees 0 to 8; channel 9 sees 5 to 13.
    assert result[0] == pytest.approx(30 / (1 + 0.001 / 9 * (900 + 1600)) ** 0.75, rel=1e-5)
    assert result[4] == pytest.approx(40 / (1 + 0.001 / 9 * (900 + 1600)) ** 0.75, rel=1e-5)
    assert result[9] == pytest.approx(50 / (1 + 0.001 / 9 * 2500) ** 0.75, rel=1e-5)
    rng = np.random.default_rng(0).normal(size=(2, 3, 3, 64)).astype(np.float32)
    theirs = tf.nn.local_response_normalization(rng, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)
    assert np.allclose(cifar10.local_response_normalisation(tf.constant(rng)), theirs, atol=1e-6)


# MNIST.


def write_mnist(folder, *, images: bytes | None = None, labels: bytes | None = None, suffix: str = "-ubyte"):
    pixels = np.arange(2 * 784, dtype=np.int64).astype(np.uint8).tobytes()
    images = struct.pack(">4I", 0x803, 2, 28, 28) + pixels if images is None else images
    labels = struct.pack(">2I", 0x801, 2) + bytes([7, 1]) if labels is None else labels
    for part in ("train", "t10k"):
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            packed = gzip.compress(content) if suffix.endswith(".gz") else content
            (folder / f"{part}-{name}{suffix}").write_bytes(packed)
    return folder


@pytest.mark.parametrize("suffix", ["-ubyte", "-ubyte.gz"])
def test_mnist_reads_idx(suffix, tmp_path):
    x, y = samples(mnist.read_data(write_mnist(tmp_path, suffix=suffix)).evaluation)
    assert y.numpy().tolist() == [7, 1]
    assert x.shape == (2, 28, 28, 1)
    assert float(x[0, 1, 3, 0]) == pytest.approx(31 / 255)
    assert float(x[1, 0, 0, 0]) == pytest.approx((784 % 256) / 255)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"images": struct.pack(">4I", 0x802, 2, 28, 28)},
            "must start with the number 0x00000803. Received: 0x00000802",
        ),
        ({"images": b"\0\0\x08"}, "must have 16 bytes. Received: .*train-images.*, which has 3"),
        ({"images": struct.pack(">4I", 0x803, 2, 28, 28) + b"1"}, "1584 bytes for 2x28x28. Received: 17 bytes"),
        ({"labels": struct.pack(">2I", 0x801, 1) + b"\1"}, "one label for each image.*, 1 labels in"),
        ({"labels": struct.pack(">2I", 0x801, 2) + b"\1\x0a"}, "must be 0 to 9. Received: 10 at offset 9 of"),
    ],
)
def test_mnist_errors_name_the_file(files, message, tmp_path):
    with pytest.raises(DataError, match=message):
        mnist.read_data(write_mnist(tmp_path, **files))


def test_mnist_rejects_a_truncated_file(tmp_path):
    path = write_mnist(tmp_path, suffix="-ubyte.gz") / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"must be complete. Received: .*train-images-idx3-ubyte.gz"):
        mnist.read_data(tmp_path)


# Tables of texts.


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'label,text\nx,"one, two\nthree"\ny,four\n'),
        ("a.tsv", "text\tlabel\none, two\\nthree\tx\nfour\ty\n"),
        ("a.jsonl", '{"text": "one, two\\nthree", "label": "x"}\n\n{"label": "y", "text": "four"}\n'),
    ],
)
def test_tables(name, content, tmp_path):
    path = tmp_path / name
    path.write_text("\ufeff" + content, encoding="utf-8")
    rows = tables.read_rows([path], "text", "label")
    assert [(row.text.replace("\\n", "\n"), row.label) for row in rows] == [("one, two\nthree", "x"), ("four", "y")]
    assert rows[1].place == f"{path}, line {4 if name == 'a.csv' else 3}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label\nfine,x\n\xff\xfe,y\n", "must be UTF-8. Received: .*a.csv, at offset 18"),
        (
            "a.csv",
            b"words,label\nfine,x\n",
            "a text in 'text'.*None and 'x' in .*a.csv, line 2, whose columns are words",
        ),
        ("a.csv", b"text,label\nfine,x\nshort\n", "'short' and None in .*a.csv, line 3"),
        ("a.csv", b'text,label\n"open,x\n', "rows must be well-formed. Received: .*a.csv, line 2"),
        ("a.csv", b"text,label\n", "at least one row. Received: .*a.csv"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": \n', "must be JSON. Received: .*a.jsonl, line 2"),
        ("a.jsonl", b"[1]\n", r"JSON object. Received: .*a.jsonl, line 1: \[1\]"),
        ("a.jsonl", b'{"text": 5, "label": 1}\n', "Received: 5 and 1 in .*a.jsonl, line 1"),
    ],
)
def test_table_errors_name_file_and_line(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        tables.read_rows([path], "text", "label")


def test_texts_become_token_sequences_of_fixed_length(tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\nthe cat\tb\nthe dog the\ta\n")
    (tmp_path / "test.tsv").write_text("text\tlabel\nThe bird!\ta\n")
    data = text.text_task(max_words=4).read_data(tmp_path)
    assert data.num_classes == 2
    assert data.vocabulary[:3] == ["", "[UNK]", "the"]
    x, y = samples(data.evaluation)
    assert x.numpy().tolist() == [[2, 1, 0, 0]]
    assert y.numpy().tolist() == [0]


def test_label_that_occurs_only_in_the_test_data_is_rejected(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,x\n")
    (tmp_path / "test.csv").write_text("text,label\na,x\na,z\n")
    with pytest.raises(
        DataError, match=r"must occur in the training data. Received: 'z' in .*test.csv, line 3; training labels: 'x'"
    ):
        text.TASK.read_data(tmp_path)


# Tabular.


def test_tabular_reports_an_invalid_label_with_file_and_offset(tmp_path):
    for part, label in (("train", 2), ("test", 1)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{part}.tfrecord")) as writer:
            for value in (1, label):
                values = {**dict.fromkeys(tabular.FEATURES, 3), "label": value}
                columns = {
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=[each])) for name, each in values.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=columns))
                writer.write(example.SerializeToString())
    data = tabular.TASK.read_data(tmp_path)
    (bad,) = data.training.find_bad(np.arange(2))
    assert bad.where.startswith(f"{tmp_path / 'train.tfrecord'}, record 1 at offset ")
    assert "label must be 0 or 1" in bad.cause
    x, y = samples(data.evaluation)
    assert x.numpy().tolist() == [[3.0] * 5] * 2
    assert y.numpy().tolist() == [[1.0], [1.0]]


def test_tabular_is_5_10_1():
    assert [tuple(v.shape) for v in tabular.make_model(NO_DATA).weights] == [(5, 10), (10,), (10, 1), (1,)]


# All tasks.


@pytest.mark.parametrize("name", ["cifar10", "mnist", "mnist-softmax", "tabular", "text"])
def test_missing_data_is_reported_with_its_source(name, tmp_path):
    with pytest.raises(
        DataError, match=rf"--task {name.removesuffix('-softmax')} needs .*no --data-dir.*--make-sample-data"
    ):
        load_task(name).read_data(None)
    with pytest.raises(
        DataError, match=r"which contains none\. The data set is (.*published at http|a table of your own)"
    ):
        load_task(name).read_data(tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "tabular", "text"])
def test_sample_data_is_readable_by_its_task(name, tmp_path, capsys):
    sample_data.write(name, tmp_path)
    assert f"--task {name} --data-dir {tmp_path}" in capsys.readouterr().out
    task = load_task(name)
    data = task.read_data(tmp_path)
    assert task.make_model(data)(samples(data.evaluation, 2)[0]).shape[0] == 2
    with pytest.raises(DataError, match="must be a new or empty folder"):
        sample_data.write(name, tmp_path)


def test_task_without_files_has_no_sample_data(tmp_path):
    with pytest.raises(UsageError, match="needs a task that reads files"):
        sample_data.write("digits", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["synthetic-resnet50", "synthetic-transformer"])
def test_synthetic(name):
    task = load_task(name)
    data = task.read_data(None)
    model = task.make_model(data)
    assert 5e6 < model.count_params() < 3e7
    x, y = samples(data.training, 2)
    assert np.isfinite(float(keras.losses.get(task.make_loss())(y, model(x))))


def test_dlrm_reads_click_logs(tmp_path):
    line = b"\t".join([b"1", b"3", b"-2", b"", *[b"0"] * 10, b"", b"0000000a", b"ffffffff", *[b"1"] * 23]) + b"\n"
    (tmp_path / "train.tsv").write_bytes(line + line.replace(b"1\t3", b"0\t5", 1))
    (tmp_path / "test.tsv").write_bytes(line)
    data = dlrm.read_data(tmp_path)
    x, y = samples(data.training)
    assert np.array_equal(y, [[1], [0]])
    assert np.allclose(x["numbers"][:, :3], np.log1p([[3, 0, 0], [5, 0, 0]]))
    rows = dlrm.ROWS_PER_CATEGORY - 1
    assert np.array_equal(x["categories"][0], [0, 1 + 10, 1 + 0xFFFFFFFF % rows, *[2] * 23])
    for bad in (line[2:], line.replace(b"0000000a", b"no"), b"2" + line[1:]):
        (tmp_path / "test.tsv").write_bytes(line + bad)
        with pytest.raises(DataError, match=r"test.tsv, line 2"):
            dlrm.read_data(tmp_path)


@pytest.mark.slow
def test_dlrm_learns_from_its_sample_data(tmp_path):
    sample_data.write("synthetic-dlrm", tmp_path)
    task = load_task("synthetic-dlrm")
    data = task.read_data(tmp_path)
    keras.utils.set_random_seed(0)
    model = task.make_model(data)
    task.compile(model, keras.optimizers.Adagrad(0.05))
    x, y = samples(data.training)
    # With eight seeds, 0.72 to 0.76; the more frequent label has 0.54.
    model.fit(x, y, batch_size=256, epochs=8, verbose=0)
    test = samples(data.evaluation)
    assert model.evaluate(*test, verbose=0, return_dict=True)["accuracy"] > 0.65


def test_every_built_in_task_loads():
    assert all(isinstance(load_task(name), Task) for name in BUILT_IN)


# Custom tasks.

CUSTOM = """
import keras, numpy as np, hvdtrain
from hvdtrain.data import Arrays, Data

def read(data_dir):
    x = np.ones((8, 3), "float32")
    return Data(Arrays(x, x[:, :1]), None)

def make(data):
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])

TASK = OTHER = hvdtrain.Task(model=make, data=read, loss="mse")
NUMBER = 5
"""


def test_custom_task(tmp_path, monkeypatch):
    path = tmp_path / "own_task.py"
    path.write_text(CUSTOM)
    assert load_task(str(path)).loss == "mse"
    assert load_task(f"{path}:OTHER").loss == "mse"
    monkeypatch.chdir(tmp_path)
    assert load_task("own_task:OTHER").loss == "mse"
    assert [short_name(name) for name in ("digits", str(path), f"{path}:OTHER", "a.b:C")] == [
        "digits",
        "own_task",
        "own_task-OTHER",
        "a.b-C",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such", r"must name a task \(digits, .*Received: 'no_such'"),
        ("no_such.py", "a file that exists on every rank. Received: .no_such.py"),
        ("no_such_module:TASK", "a module that can be imported. Received: 'no_such_module'"),
        ("{file}:NUMBER", "Received: NUMBER of .*, which is a int"),
        ("{file}:NOTHING", "Received: NOTHING of .*, which does not exist"),
    ],
)
def test_invalid_task_names(name, message, tmp_path):
    path = tmp_path / "own_task.py"
    path.write_text(CUSTOM)
    with pytest.raises(UsageError, match=message):
        load_task(name.format(file=path))


def test_errors_in_a_custom_task_propagate(tmp_path):
    path = tmp_path / "broken_task.py"
    path.write_text("import no_such_module_of_mine\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_mine"):
        load_task(str(path))


def test_return_values_of_a_task_are_checked():
    task = Task(model=lambda data: None, data=lambda folder: (1, 2), loss="mse")
    with pytest.raises(UsageError, match=r"must return hvdtrain.data.Data. Received: \(1, 2\)"):
        task.read_data(None)
    with pytest.raises(UsageError, match=r"must return a keras\.Model\. Received: None"):
        task.make_model(NO_DATA)


def test_loss_weights_of_a_task_reach_the_loss():
    inputs = keras.layers.Input((3,))
    outputs = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs) for _ in range(2)]
    model = keras.Model(inputs, outputs)
    mse = ["mse", "mse"]
    task = Task(model=lambda data: model, data=lambda folder: NO_DATA, loss=lambda: mse, loss_weights=[0.5, 3.0])
    task.compile(task.make_model(NO_DATA), keras.optimizers.SGD())
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    assert float(model.compute_loss(x, [y, y], model(x))) == pytest.approx((0.5 + 3.0) * 2.0**2)


@pytest.mark.parametrize("loss_weights", [["0.5"], {"label": None}, 0.5, "half"])
def test_bad_loss_weights_of_a_task_are_refused(loss_weights):
    with pytest.raises(UsageError, match="loss_weights of a task must be a list of numbers, or a dict"):
        Task(model=lambda data: None, data=lambda folder: NO_DATA, loss="mse", loss_weights=loss_weights)


def test_a_compiled_model_of_a_task_is_refused():
    """It would be compiled again, without its own arguments of ``compile``."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(loss="mse", loss_weights=0.5)
    with pytest.raises(UsageError, match=r"must return a model that is not compiled.*Received: sequential"):
        Task(model=lambda data: model, data=lambda folder: NO_DATA, loss="mse").make_model(NO_DATA)


def test_a_model_of_a_task_has_the_compile_of_keras():
    class TwoOptimizers(keras.Sequential):
        def compile(self, d_optimizer, g_optimizer):
            super().compile()

    model = TwoOptimizers([keras.layers.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(UsageError, match=r"must have Keras' compile.*Received: TwoOptimizers.compile"):
        Task(model=lambda data: model, data=lambda folder: NO_DATA, loss="mse").make_model(NO_DATA)
