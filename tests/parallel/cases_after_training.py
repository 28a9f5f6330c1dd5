"""On all ranks: evaluation, prediction and saved models, with the values of one process."""

import csv
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, samples
from tensorflow.python.lib.io import file_io

import hvdtrain
from hvdtrain.data import Arrays, Data
from hvdtrain.distributed import runtime, whole_saves
from hvdtrain.errors import DisagreementError, JobError, UsageError

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
COUNT = 29


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def folder():
    """The same on all ranks, which are on one host."""
    path = Path(COLLECTIVES.allgather(str(Path.cwd() / "after_training"))[0])
    if RANK == 0:
        path.mkdir(exist_ok=True)
    COLLECTIVES.barrier()
    yield path
    COLLECTIVES.barrier()
    if RANK == 0:
        shutil.rmtree(path)


def metrics() -> list:
    return ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")]


def compiled(**options) -> keras.Model:
    model = dense_model()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss(), metrics=metrics(), **options)
    return model


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples(count)
    x[1::2] *= 5  # Otherwise the shares of all ranks have similar values.
    return x.astype(np.float64), y


def kinds(count: int) -> dict:
    """The same samples in what Keras and hvdtrain accept."""
    x, y = arrays(count)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return {"arrays": (x, y), "dataset": dataset, "batches": dataset.batch(4), "source": Arrays(x, y)}


def of_one_process(count: int) -> dict[str, float]:
    model = dense_model()
    model.compile(loss=loss(), metrics=metrics())
    return model.evaluate(*arrays(count), batch_size=4, return_dict=True, verbose=0)


def require_equal(found: dict[str, float], expected: dict[str, float]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("kind", ["arrays", "dataset", "batches", "source"])
@pytest.mark.parametrize("count", [1, 2, 3, COUNT])
def test_evaluation(kind, count):
    model = compiled()
    require_equal(hvdtrain.evaluate(model, kinds(count)[kind], batch_size=4), of_one_process(count))


def test_evaluation_leaves_the_model_as_it_was():
    model = compiled(steps_per_execution=3)
    for _ in range(2):
        require_equal(hvdtrain.evaluate(model, arrays(COUNT), batch_size=4), of_one_process(COUNT))
    assert model.steps_per_execution == 3
    require_equal(model.evaluate(*arrays(COUNT), batch_size=4, return_dict=True, verbose=0), of_one_process(COUNT))
    # Compiled again, with other metrics.
    model.compile(loss=loss(), metrics=["accuracy"])
    assert set(hvdtrain.evaluate(model, arrays(COUNT))) == {"loss", "accuracy"}


def test_model_evaluate_on_parts_of_different_lengths():
    model = compiled()
    part = hvdtrain.shard(*arrays(COUNT), drop_remainder=False)
    own = model.evaluate(*part, return_dict=True, verbose=0)
    found = model.evaluate(*part, batch_size=4, return_dict=True, verbose=0, callbacks=hvdtrain.callbacks.distributed())
    expected = of_one_process(COUNT)
    require_equal(found, expected)
    if SIZE > 1:
        assert own["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    in_order = model.evaluate(*part, batch_size=4, verbose=0, callbacks=hvdtrain.callbacks.distributed())
    np.testing.assert_allclose(in_order, [expected[name] for name in ("loss", "accuracy", "entropy")], rtol=1e-12)


def test_model_evaluate_between_and_after_epochs():
    """With the statistics of all ranks, and callbacks that see the values over all ranks."""
    seen = []

    class Collect(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            seen.append(dict(logs))

    model = compiled()
    part = hvdtrain.shard(*arrays(COUNT), drop_remainder=False)
    train = hvdtrain.shard(*arrays(24))
    callbacks = hvdtrain.callbacks.distributed([Collect()])
    model.fit(*train, batch_size=4, epochs=2, validation_data=part, verbose=0, callbacks=callbacks)
    seen.clear()
    values = model.evaluate(*part, return_dict=True, verbose=0, callbacks=callbacks)
    assert seen == [values]
    require_equal(values, hvdtrain.evaluate(model, arrays(COUNT)))


def test_statistics_of_all_ranks():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((6,)), layers.BatchNormalization(), layers.Dense(NUM_CLASSES)])
    model.compile(loss=loss())
    mean = model.layers[0].moving_mean
    mean.assign(np.full(6, float(RANK)))
    part = hvdtrain.shard(*arrays(COUNT), drop_remainder=False)
    found = model.evaluate(*part, return_dict=True, verbose=0, callbacks=hvdtrain.callbacks.distributed())
    values = hvdtrain.evaluate(model, arrays(COUNT))
    predicted = hvdtrain.predict(model, arrays(COUNT)[0], on_all_ranks=True)
    np.testing.assert_array_equal(mean.numpy(), RANK)
    mean.assign(np.full(6, (SIZE - 1) / 2))
    expected = model.evaluate(*arrays(COUNT), return_dict=True, verbose=0)
    require_equal(found, expected)
    require_equal(values, expected)
    np.testing.assert_allclose(predicted, model.predict(arrays(COUNT)[0], verbose=0), rtol=1e-12)


@pytest.mark.parametrize("kind", ["arrays", "dataset", "batches", "source"])
@pytest.mark.parametrize("count", [1, 2, 3, COUNT])
def test_prediction(kind, count):
    model = compiled()
    expected = model.predict(arrays(count)[0], verbose=0)
    found = hvdtrain.predict(model, kinds(count)[kind], batch_size=4, on_all_ranks=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    on_first = hvdtrain.predict(model, kinds(count)[kind], batch_size=4)
    assert (on_first is None) == (RANK > 0)
    if RANK == 0:
        np.testing.assert_array_equal(on_first, found)


def several_outputs() -> keras.Model:
    inputs = layers.Input((6,))
    return keras.Model(inputs, {"class": layers.Dense(3)(inputs), "parts": [layers.Dense(1)(inputs), inputs]})


def test_prediction_of_several_outputs():
    model = several_outputs()
    x, _ = arrays(COUNT)
    found = hvdtrain.predict(model, x, batch_size=4, on_all_ranks=True)
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), found, model.predict(x, verbose=0)
    )


def two_inputs(as_list: bool) -> keras.Model:
    """A model whose inputs have a structure of two."""
    keras.utils.set_random_seed(1)
    wide, narrow = layers.Input((6,)), layers.Input((2,))
    outputs = layers.Dense(NUM_CLASSES)(layers.Concatenate()([wide, narrow]))
    model = keras.Model([wide, narrow] if as_list else {"wide": wide, "narrow": narrow}, outputs)
    model.compile("sgd", loss(), metrics=["accuracy"])
    return model


@pytest.mark.parametrize("as_list", [True, False])
def test_several_inputs(as_list):
    x, y = arrays(COUNT)
    model, several = two_inputs(as_list), [x, x[:, :2]] if as_list else {"wide": x, "narrow": x[:, :2]}
    expected = model.evaluate(several, y, batch_size=4, return_dict=True, verbose=0)
    require_equal(hvdtrain.evaluate(model, (several, y), batch_size=4), expected)
    expected = model.predict(several, verbose=0)
    for data in (several, (several,), (several, y)):
        found = hvdtrain.predict(model, data, batch_size=4, on_all_ranks=True)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_several_outputs():
    inputs = layers.Input((6,))
    model = keras.Model(inputs, [layers.Dense(NUM_CLASSES, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
    model.compile("sgd", [loss(), "mse"])
    # Whole batches: the loss of each output is a mean over batches, also in Keras.
    x, y = arrays(8 * SIZE)
    expected = model.evaluate(x, [y, x[:, :1]], batch_size=4, return_dict=True, verbose=0)
    require_equal(hvdtrain.evaluate(model, (x, [y, x[:, :1]]), batch_size=4), expected)


@pytest.mark.parametrize("block_bytes", [1, 1 << 24])
def test_prediction_files(folder, block_bytes, monkeypatch):
    monkeypatch.setattr("hvdtrain.training.predicted_share._BLOCK_BYTES", block_bytes)
    model, (x, _) = compiled(), arrays(COUNT)
    expected = model.predict(x, verbose=0)
    for name in ("a.npy", "a.csv", "a.parquet"):
        assert hvdtrain.predict(model, x, batch_size=4, output=folder / name) is None
    np.testing.assert_allclose(np.load(folder / "a.npy"), expected, rtol=1e-12)
    with open(folder / "a.csv") as file:
        header, *rows = csv.reader(file)
    assert header == [f"prediction_{i}" for i in range(NUM_CLASSES)]
    np.testing.assert_allclose(np.array(rows, np.float64), expected, rtol=1e-12)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(folder / "a.parquet")
    np.testing.assert_allclose(table["prediction"].to_pylist(), expected, rtol=1e-12)


def test_files_of_several_outputs(folder):
    model, (x, _) = several_outputs(), arrays(COUNT)
    hvdtrain.predict(model, x, output=folder / "a.csv")
    with open(folder / "a.csv") as file:
        header, *rows = csv.reader(file)
    names = [*(f"class_{i}" for i in range(3)), "parts_output_0", *(f"parts_output_1_{i}" for i in range(6))]
    assert header == names
    np.testing.assert_allclose(np.array(rows, np.float64)[:, 4:], x, rtol=1e-12)
    with pytest.raises(JobError, match=r"npy holds one output. Received: class, parts_output_0, parts_output_1"):
        hvdtrain.predict(model, x, output=folder / "b.npy")
    COLLECTIVES.barrier()
    assert names_in(folder) == ["a.csv"]


def test_half_precision_is_written_as_float32(folder):
    model = keras.Sequential([layers.Input((6,)), layers.Dense(2, dtype="bfloat16")])
    x, _ = arrays(COUNT)
    hvdtrain.predict(model, x, output=folder / "a.npy")
    written = np.load(folder / "a.npy")
    assert written.dtype == np.float32
    np.testing.assert_array_equal(written, model.predict(x, verbose=0).astype(np.float32))


def test_a_file_that_cannot_be_written_ends_no_other_rank(folder):
    model, (x, _) = compiled(), arrays(COUNT)
    if RANK == 0:
        (folder / "a.npy").mkdir()
    COLLECTIVES.barrier()
    with pytest.raises(JobError, match=r"output must be a file that can be written. Received: "):
        hvdtrain.predict(model, x, output=folder / "a.npy")
    COLLECTIVES.barrier()
    assert names_in(folder) == ["a.npy"]


def names_in(folder) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def load_weights(path) -> keras.Model:
    model = compiled()
    model.load_weights(path)
    return model


@pytest.mark.parametrize(
    ("name", "save", "load"),
    [
        ("model.keras", keras.Model.save, keras.models.load_model),
        ("model.h5", keras.Model.save, keras.models.load_model),
        ("model.weights.h5", keras.Model.save_weights, load_weights),
        ("model.keras", keras.saving.save_model, keras.saving.load_model),
        ("model.weights.h5", keras.saving.save_weights, load_weights),
    ],
)
def test_all_ranks_may_save_to_the_same_file(name, save, load, folder):
    model, path = compiled(), folder / name
    hvdtrain.broadcast(model)
    for _ in range(10):
        save(model, path)
        np.testing.assert_array_equal(load(path).layers[-1].kernel, model.layers[-1].kernel)
    COLLECTIVES.barrier()
    assert names_in(folder) == [name]


def test_all_ranks_may_write_checkpoints_of_tensorflow_to_the_same_path(folder):
    model, prefix = compiled(), folder / "made" / "checkpoint"
    hvdtrain.broadcast(model)
    checkpoint = tf.train.Checkpoint(model=model)
    for _ in range(30):
        assert checkpoint.write(prefix) == str(prefix)
        written, there = model.layers[-1].kernel.numpy(), compiled()
        tf.train.Checkpoint(model=there).read(str(prefix)).assert_existing_objects_matched()
        np.testing.assert_array_equal(there.layers[-1].kernel, written)
    COLLECTIVES.barrier()
    assert names_in(prefix.parent) == ["checkpoint.data-00000-of-00001", "checkpoint.index"]


def test_managed_checkpoints_of_tensorflow_are_found(folder):
    model = compiled()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), folder, max_to_keep=2)
    saved = [manager.save() for _ in range(3)]
    assert saved == [str(folder / f"ckpt-{number}") for number in (1, 2, 3)]
    COLLECTIVES.barrier()
    assert tf.train.latest_checkpoint(folder) == saved[-1]
    files = [f"ckpt-{number}.{kind}" for number in (2, 3) for kind in ("data-00000-of-00001", "index")]
    assert names_in(folder) == ["checkpoint", *files]


@pytest.mark.parametrize("save", [keras.Model.save, keras.Model.save_weights])
def test_a_name_that_keras_refuses_is_that_of_the_user(save, folder):
    with pytest.raises(ValueError, match=r"model\.txt") as refused:
        save(compiled(), folder / "model.txt")
    assert "writing" not in str(refused.value)


VARIABLES = ("variables.data-00000-of-00001", "variables.index")


def write_archive(model, path) -> None:
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [tf.TensorSpec([None, 6])])
    archive.write_out(path)


def save_module(model, path) -> None:
    model.serve = tf.function(model.call, [tf.TensorSpec([None, 6])])
    tf.saved_model.save(model, str(path))


@pytest.mark.parametrize("save", [keras.Model.export, write_archive, save_module])
def test_all_ranks_may_export_to_the_same_folder(save, folder, capsys):
    model, path = compiled(), folder / "made" / "exported"
    hvdtrain.broadcast(model)
    for _ in range(5):
        save(model, path)
    said = capsys.readouterr().out
    assert (f"'{path}'" in said) == (save is not save_module)  # Keras says where it is
    COLLECTIVES.barrier()
    (path / "variables" / f"of-rank-{RANK}").touch()
    COLLECTIVES.barrier()
    save(model, path)
    COLLECTIVES.barrier()
    assert names_in(path.parent) == ["exported"]
    assert {f"of-rank-{rank}" for rank in range(SIZE)} < set(names_in(path / "variables"))
    x, loaded = samples(3)[0], tf.saved_model.load(str(path))
    np.testing.assert_array_equal(loaded.serve(x), model.predict(x, verbose=0))


@pytest.mark.parametrize("limit", ["mount point", "parent that is read-only"])
def test_an_export_to_a_folder_that_cannot_be_replaced(limit, folder, monkeypatch):
    path = folder / "exported"
    path.mkdir(exist_ok=True)
    if limit == "mount point":
        monkeypatch.setattr(Path, "is_mount", lambda self: self == path)
    else:
        monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != folder)  # Tests may be run by root.
    inode = path.stat().st_ino
    names_below = whole_saves._names_in

    def names_below_what_no_rank_writes_in(folder):
        assert folder != path  # What other ranks write there disappears meanwhile.
        return names_below(folder)

    monkeypatch.setattr(whole_saves, "_names_in", names_below_what_no_rank_writes_in)
    COLLECTIVES.barrier()
    model = compiled()
    hvdtrain.broadcast(model)
    for _ in range(3):
        model.export(path, verbose=False)
    COLLECTIVES.barrier()
    assert path.stat().st_ino == inode
    assert (names_in(folder), names_in(path / "variables")) == (["exported"], sorted(VARIABLES))
    assert [each for each in names_in(path) if each.startswith(".")] == []
    x, loaded = samples(3)[0], tf.saved_model.load(str(path))
    np.testing.assert_array_equal(loaded.serve(x), model.predict(x, verbose=0))


def test_exports_of_different_ranks_do_not_mix(folder, monkeypatch):
    module, write_graph = tf.Module(), file_io.atomic_write_string_to_file
    module.weight = tf.Variable(tf.zeros([3 + COLLECTIVES.rank]))

    def write_graph_last(path, *arguments, **named) -> None:
        if Path(path).name == "saved_model.pb":
            COLLECTIVES.barrier()  # The variables are written, and so the other ranks begin.
            COLLECTIVES.barrier()  # They are done.
        write_graph(path, *arguments, **named)

    if COLLECTIVES.rank == 0:
        monkeypatch.setattr(file_io, "atomic_write_string_to_file", write_graph_last)
    else:
        COLLECTIVES.barrier()
    tf.saved_model.save(module, str(folder / "module"))
    if COLLECTIVES.rank != 0:
        COLLECTIVES.barrier()
    COLLECTIVES.barrier()
    assert tf.saved_model.load(str(folder / "module")).weight.shape == [3]


def test_what_is_refused():
    model, (x, y) = compiled(), arrays(COUNT)
    with pytest.raises(JobError, match=r"output must end in \.npy, \.csv, \.parquet"):
        hvdtrain.predict(model, x, output="a.txt")
    with pytest.raises(JobError, match=r"on_all_ranks must not be set with output"):
        hvdtrain.predict(model, x, output="a.csv", on_all_ranks=True)
    with pytest.raises(JobError, match=r"batch_size must be at least 1. Received: 0"):
        hvdtrain.predict(model, x, batch_size=0)
    with pytest.raises(JobError, match="at least 1"):
        hvdtrain.evaluate(model, (x[:0], y[:0]))
    with pytest.raises(UsageError, match="must be compiled to be evaluated"):
        hvdtrain.evaluate(dense_model(), (x, y))
    if SIZE > 1:
        with pytest.raises(DisagreementError, match=r"arguments of hvdtrain.predict"):
            hvdtrain.predict(model, x[: COUNT - RANK])
        with pytest.raises(JobError, match="data must be a source"):
            hvdtrain.predict(model, x if RANK == 0 else 3)


@pytest.mark.skipif(SIZE == 1, reason="needs another rank")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hvdtrain.evaluate", lambda model, x, y: hvdtrain.evaluate(model, (x, y))),
        ("hvdtrain.predict", lambda model, x, y: hvdtrain.predict(model, x)),
        (
            "model.evaluate",
            lambda model, x, y: model.evaluate(x, y, verbose=0, callbacks=hvdtrain.callbacks.distributed()),
        ),
        ("hvdtrain.barrier", lambda model, x, y: hvdtrain.barrier()),
    ],
)
def test_a_rank_that_is_alone_in_a_call_does_not_wait_for_the_others(name, call):
    model, (x, y) = compiled(), arrays(4 * SIZE)
    with pytest.raises(DisagreementError, match=f"call: '{name}' on rank 0"):
        call(model, x, y) if RANK == 0 else model.fit(x, y, verbose=0)


def test_an_error_in_the_data_of_one_rank_ends_no_other():
    model, (x, y) = compiled(), arrays(COUNT)

    class Failing:
        def __len__(self):
            return COUNT

        def __getitem__(self, number):
            if number == 1 and "sees" in vars(self):
                raise OSError("unreadable")
            return x[number], y[number]

    data = hvdtrain.data.RandomAccess(broken := Failing())
    broken.sees = True
    with pytest.raises(JobError, match="unreadable"):
        hvdtrain.predict(model, data)
    with pytest.raises(JobError, match="unreadable"):
        hvdtrain.evaluate(model, data)


class Preprocessing(keras.Model):
    """Preprocesses samples as the models of KerasHub do: not in its ``train_step``, but in what calls it."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        lengths = tf.strings.length(x)
        x = tf.cast(tf.reshape(tf.io.decode_raw(x, tf.uint8, fixed_length=8), [-1, 8]), tf.float64) / 100
        return keras.utils.pack_x_y_sample_weight(x, y, tf.cast(lengths, tf.float64) / 4)

    def fit(self, dataset, **options):
        return super().fit(dataset.map(self.preprocess_samples), **options)

    def evaluate(self, dataset, **options):
        return super().evaluate(dataset.map(self.preprocess_samples), **options)

    def predict(self, dataset, **options):
        return super().predict(dataset.map(self.preprocess_samples), **options)


def preprocessing_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    inputs = keras.Input((8,))
    outputs = layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(3))(inputs)
    model = Preprocessing(inputs, outputs)
    model.compile(optimizer, loss(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_models_that_preprocess_their_samples(kind, capfd):
    texts = np.array(["abcdefgh"[: 1 + i % 7] for i in range(24)])
    targets = np.array([i % 2 for i in range(24)])
    samples = tf.data.Dataset.from_tensor_slices((texts, targets))
    alone = preprocessing_model(keras.optimizers.SGD(0.1))
    alone.fit(samples.batch(4 * SIZE), epochs=2, verbose=0)

    model = preprocessing_model(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = samples if kind == "dataset" else hvdtrain.data.RandomAccess(list(zip(texts, targets, strict=True)))
    config = hvdtrain.TrainConfig(batch_size=4, epochs=2)
    trainer = hvdtrain.Trainer(model, Data(data, data), config, reporter=None)
    if kind == "dataset":
        trainer.fit()
        np.testing.assert_allclose(model.weights[0], alone.weights[0], rtol=1e-12)
    model.set_weights(alone.get_weights())
    values = alone.evaluate(samples.batch(4), return_dict=True, verbose=0)
    for found in (trainer.evaluate(), hvdtrain.evaluate(model, data)):
        require_equal(found, values)
    predicted = hvdtrain.predict(model, tf.data.Dataset.from_tensor_slices(texts), on_all_ranks=True)
    np.testing.assert_allclose(predicted, alone.predict(samples.batch(4).map(lambda x, y: x), verbose=0), rtol=1e-12)
    assert "and not Preprocessing" not in capfd.readouterr().err


def test_the_trainer_evaluates_and_predicts():
    model, (x, y) = compiled(), arrays(COUNT)
    config = hvdtrain.TrainConfig(batch_size=4, steps=3)
    trainer = hvdtrain.Trainer(model, Data(Arrays(x, y), Arrays(x, y)), config, reporter=None)
    trainer.fit()
    values = model.evaluate(x, y, return_dict=True, verbose=0)
    require_equal(trainer.evaluate(), values)
    require_equal(trainer.evaluate((x, y)), values)
    np.testing.assert_allclose(trainer.predict(x, on_all_ranks=True), model.predict(x, verbose=0), rtol=1e-12)
    without = hvdtrain.Trainer(compiled(), Arrays(x, y), config, reporter=None)
    with pytest.raises(UsageError, match="the trainer has none to evaluate on"):
        without.evaluate()
