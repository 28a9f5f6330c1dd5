"""Sources: whatever Keras takes trains as the same samples do in another form."""

import keras
import numpy as np
import psutil
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays, Batches, Data, RandomAccess, Stream, evaluation_dataset, stream, training_dataset
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.data.splits import as_source
from hvdtrain.errors import DataError, UsageError

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 5)).astype(np.float32), RNG.integers(0, 3, 50).astype(np.int32)


class InBatches(keras.utils.PyDataset):
    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def __len__(self):
        return -(-len(X) // self._size)

    def __getitem__(self, index):
        part = slice(index * self._size, (index + 1) * self._size)
        return X[part], Y[part]


class Samples:
    """Samples one by one; those in ``broken`` cannot be read."""

    def __init__(self, broken=()):
        self._broken = broken

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        if number in self._broken:
            raise OSError(f"cannot read {number}")
        return X[number], Y[number]


def trained(source, **options) -> list[bytes]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    summary = make_trainer(model, source, source, **{"batch_size": 16, "epochs": 2, **options}).fit()
    return [summary["eval"], *(variable.numpy().tobytes() for variable in model.weights)]


SINGLE = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.mark.parametrize(
    "source",
    [
        SINGLE.batch(7),
        Stream(SINGLE.batch(10, drop_remainder=True), batched=True, num_samples=50),
        Stream(SINGLE.batch(7).filter(lambda *_: True)),
        InBatches(7),
        InBatches(16),
        InBatches(100),
    ],
    ids=["data set", "full batches", "stream", "batches of 7", "batches of 16", "one batch"],
)
def test_batches_train_as_their_samples(source):
    assert trained(source) == trained(SINGLE)


@pytest.mark.parametrize(
    "source",
    [RandomAccess(Samples()), Samples(), (X, Y), (X.tolist(), Y)],
    ids=["random access", "sequence", "arrays", "lists"],
)
def test_samples_by_number_train_as_arrays(source):
    if isinstance(source, tuple):
        source = tuple(np.asarray(each, like.dtype) for each, like in zip(source, (X, Y), strict=True))
    assert trained(source) == trained(Arrays(X, Y))


class Pairs:
    """Samples with two inputs in a list."""

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return [X[number], X[number] ** 2], Y[number]


class BatchesOfPairs(keras.utils.PyDataset):
    num_batches = 5

    def __getitem__(self, number):
        rows = slice(10 * number, 10 * number + 10)
        return [X[rows], X[rows] ** 2], Y[rows]


@pytest.mark.parametrize("source", [([X, X**2], Y), Pairs(), BatchesOfPairs()], ids=["arrays", "samples", "batches"])
def test_inputs_in_a_list_are_not_stacked(source):
    (first, second), _ = next(iter(evaluation_dataset(as_source(source), 7, rank=0, size=1)))
    np.testing.assert_array_equal(first, X[:7])
    np.testing.assert_array_equal(second, X[:7] ** 2)


@pytest.mark.parametrize("kind", [scipy.sparse.csr_matrix, scipy.sparse.coo_array], ids=["matrix", "array"])
def test_sparse_matrices_train_as_dense_arrays(kind):
    x = np.where(X > 0, X, 0)
    assert trained((kind(x), Y)) == trained((x, Y))


@pytest.mark.parametrize("make", [tf.sparse.from_dense, tf.RaggedTensor.from_tensor])
def test_tensors_without_rows_of_one_shape_are_refused(make):
    with pytest.raises(DataError, match=r"rows of one shape\. Received: (Sparse|Ragged)Tensor"):
        as_source((make(X), Y))


class Autoencoder(keras.Model):
    """Trains on x alone."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("source", [X, Arrays(X), SINGLE.map(lambda x, y: x), RandomAccess(list(X))], ids=type)
def test_models_that_train_on_x_alone(source):
    def model():
        keras.utils.set_random_seed(3)
        model = Autoencoder()
        model(X[:1])
        model.compile(optimizer="sgd", jit_compile=False)
        return model

    plain, ours = model(), model()
    source = as_source(source)
    order = SamplePlan(num_samples=50, batch_size=10, shuffle=not source.keeps_order).order(0)
    plain.fit(X[order], batch_size=10, shuffle=False, verbose=0)
    make_trainer(ours, source, batch_size=10, epochs=1).fit()
    for mine, theirs in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_batches_of_a_fixed_size_are_distinguished_from_samples():
    batches = SINGLE.batch(10, drop_remainder=True)
    with pytest.raises(
        UsageError, match=r"Received: \(10, 5\) for an input of \(5,\).*Stream\(dataset, batched=True\)"
    ):
        trained(batches)
    assert trained(Stream(batches, batched=True)) == trained(SINGLE)


def test_x_alone_can_be_augmented():
    source = Arrays({"a": X}, augment=lambda x, y, seed: ({"a": x["a"] + 1}, y))
    plan = SamplePlan(num_samples=50, batch_size=50, shuffle=False)
    data, _ = next(iter(training_dataset(source, plan)))
    np.testing.assert_array_equal(data["a"], X + 1)


@pytest.mark.parametrize("kind", [object, np.str_])
def test_columns_of_strings(kind):
    def columns(last: str):
        words = np.array([f"word {i % 7}" for i in range(49)] + [last], kind)
        return {"words": words, "numbers": X[:, 0]}

    assert Arrays(columns("end"), Y).facts() == Arrays(columns("en" + "d"), Y).facts()
    assert Arrays(columns("end"), Y).facts() != Arrays(columns("enb"), Y).facts()
    batch = next(iter(evaluation_dataset(Arrays(columns("end"), Y), 50, rank=0, size=1)))
    assert batch[0]["words"].numpy().tolist() == [each.encode() for each in columns("end")["words"]]
    with pytest.raises(DataError, match=r"numbers or strings\. Received: dtype object, first element \[1\]"):
        Arrays(np.array([[1], [2, 3]], object), X[:2])


def own_mib() -> float:
    """The memory of this process, without pages of files."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 2**20


@pytest.mark.parametrize("mapped", [False, True])
def test_large_arrays_are_not_copied(mapped, tmp_path):
    x = np.ones((100 << 10, 256), np.float32)  # 100 MiB
    if mapped:
        np.save(tmp_path / "x.npy", x)
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = Arrays(x, np.zeros(len(x), np.int32))
    assert isinstance(source.x, np.memmap) == mapped
    before = own_mib()
    batches = iter(training_dataset(source, SamplePlan(num_samples=len(x), batch_size=32)))
    (rows, _), _ = next(batches)
    assert rows.shape == (32, 256)
    assert own_mib() - before < 50


def test_unreadable_samples_are_skipped_up_to_the_quota():
    with pytest.raises(DataError, match=r"at most 1\. Received: 2.*sample \d+: OSError: cannot read"):
        trained(RandomAccess(Samples(broken=(3, 30))), bad_samples=1)
    assert trained(RandomAccess(Samples(broken=(3,))), bad_samples=1) != trained(RandomAccess(Samples()))


class Labelled:
    """Samples whose labels are whole numbers, but for one."""

    def __init__(self, fraction: int):
        self._fraction = fraction

    def __len__(self):
        return 50

    def __getitem__(self, number):
        return [1.0, 2.0], 0.25 if number == self._fraction else 1


def test_labels_keep_their_decimals_or_are_bad_samples():
    """The types are those of the first sample and 15 others, the last one among them."""
    assert RandomAccess(Labelled(49))._one(49)[-1] == 0.25
    source = RandomAccess(Labelled(1))
    (bad,) = source.find_bad(np.arange(50))
    assert bad.number == 1
    assert "the data types of the first ones. Received: float64 in sample 1, int32 in the first." in bad.cause

    class InTwoBatches(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, index):
            return X[:4], np.zeros(4, int) if index == 0 else np.full(4, 0.7)

    assert Batches(InTwoBatches())._read_batch(1)[1].tolist() == [0.7] * 4


def test_what_cannot_be_a_source_is_refused():
    class Shuffled(InBatches):
        def on_epoch_end(self):
            pass

    class Uneven(InBatches):
        def __getitem__(self, index):
            return X[: 7 - index], Y[: 7 - index]

    class Ragged(Samples):
        def __getitem__(self, number):
            return X[number, : 5 - number % 2], Y[number]

    with pytest.raises(UsageError, match=r"same batches in every epoch\. Received: Shuffled, which has on_epoch_end"):
        Data(Shuffled(7))
    with pytest.raises(UsageError, match=r"Received: generator\. Wrap a generator"):
        Data(each for each in X)
    with pytest.raises(UsageError, match="sample_weight without y"):
        Arrays(X, sample_weight=Y)
    with pytest.raises(UsageError, match="Received: int"):
        RandomAccess(3)
    with pytest.raises(DataError, match="Received: none"):
        RandomAccess([])
    with pytest.raises(DataError, match=r"first sample must be readable.*cannot read 0"):
        RandomAccess(Samples(broken=(0,)))
    with pytest.raises(tf.errors.OpError, match="must have the same size"):
        list(evaluation_dataset(Batches(Uneven(7)), 50, rank=0, size=1))
    with pytest.raises(tf.errors.OpError, match="the same shapes"):
        list(evaluation_dataset(RandomAccess(Ragged()), 50, rank=0, size=1))


def test_a_generator_without_an_end_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(stream, "_SAYS_AFTER_S", 0.01)
    monkeypatch.setattr(stream, "_ENDS_AFTER_S", 0.2)

    def endless():
        while True:
            yield 1.0

    dataset = tf.data.Dataset.from_generator(endless, output_signature=tf.TensorSpec(()))
    with pytest.raises(UsageError, match=r"must end: .* Received: one with \d+ samples after .* num_samples="):
        Stream(dataset)
    assert capsys.readouterr().err.count("counting the samples of a data set of unknown length") == 1
    filtered = tf.data.Dataset.range(250).filter(lambda number: number % 2 == 0)
    assert Stream(filtered).num_samples == 125
    assert Stream(dataset, num_samples=3).num_samples == 3
