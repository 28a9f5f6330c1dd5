"""Checkpoints on one rank: whole or named as damaged, never deleted unasked, exact in what they hold."""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.checkpoint import Checkpointer, folders, random_state, tree
from hvdtrain.collectives import OneProcess
from hvdtrain.errors import UsageError
from hvdtrain.failure import JobError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=(16, 2)).astype(np.float32)


def make(units: int = 4, optimizer=None) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(units), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)]
    )
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(X, Y)
    return model


def checkpointer(folder: Path, model=None, **options) -> Checkpointer:
    return Checkpointer(folder, model or make(), collectives=OneProcess(), **options)


def all_values(model) -> list[np.ndarray]:
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """At steps 1 and 2, and the values of the model at each."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    model, values = make(), {}
    saver = checkpointer(folder, model)
    for step in (1, 2):
        model.train_on_batch(X, Y)
        values[step] = all_values(model)
        saver.save(step, state={"best": 0.25}, wait=True)
    return folder, values


def test_what_is_saved_is_what_the_variables_were_when_it_was_asked_for(tmp_path, monkeypatch):
    """Training goes on while the thread writes: what it writes must not follow."""
    import threading

    model = make()
    saver = checkpointer(tmp_path, model)
    before, may_write, write = all_values(model), threading.Event(), folders.write
    monkeypatch.setattr(folders, "write", lambda *arguments: (may_write.wait(), write(*arguments)))
    saver.save(1)
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert not same(before, all_values(model))
    may_write.set()
    saver.wait()
    checkpointer(tmp_path, model).restore()
    assert same(before, all_values(model))


def test_tensorflow_and_sha256sum_read_it(two_checkpoints):
    folder, values = two_checkpoints
    manifest = json.loads((folder / "step-00000002" / "manifest.json").read_text())
    kernel = manifest["variables"][0][0]
    assert re.fullmatch(r"model/sequential(_\d+)?/dense(_\d+)?/kernel", kernel)
    assert np.array_equal(tf.train.load_variable(str(folder / "step-00000002" / "state"), kernel), values[2][0])
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder / "step-00000002", capture_output=True)
    assert done.returncode == 0, done.stderr


def files_of_a_checkpoint() -> list[str]:
    return ["SHA256SUMS", "manifest.json", "state.data-00000-of-00001", "state.index"]


@pytest.mark.parametrize("kind", ["first bit", "middle bit", "last bit", "truncated", "empty", "missing"])
@pytest.mark.parametrize("name", files_of_a_checkpoint())
def test_a_damaged_file_is_named_and_the_one_before_taken(name, kind, two_checkpoints, tmp_path, capfd):
    original, values = two_checkpoints
    folder = tmp_path / "checkpoints"
    shutil.copytree(original, folder)
    assert sorted(path.name for path in (folder / "step-00000002").iterdir()) == files_of_a_checkpoint()
    path = folder / "step-00000002" / name
    content = bytearray(path.read_bytes())
    if kind.endswith("bit"):
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[kind.split()[0]]] ^= 1
    path.write_bytes(content[:-1] if kind == "truncated" else b"" if kind == "empty" else content)
    if kind == "missing":
        path.unlink()
    model = make()
    restored = checkpointer(folder, model).restore("must")
    assert restored.step == 1
    assert same(all_values(model), values[1])
    told = capfd.readouterr().err
    assert "step-00000002 is damaged: " in told
    assert name in told
    assert (folder / "step-00000002.aside1").is_dir()
    # The whole one of another step stays when the run comes to step 2 again.
    saver = checkpointer(folder, model, keep=1)
    saver.save(2, wait=True)
    assert [each.name for each in folders.checkpoints_in(folder)] == ["step-00000002"]


def test_all_damaged(two_checkpoints, tmp_path):
    original, _ = two_checkpoints
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    for folder in folders.checkpoints_in(tmp_path):
        (folder / "manifest.json").write_text("{}")
    before = contents(tmp_path)
    for resume in ("auto", "must"):
        with pytest.raises(JobError, match=r"there must be a whole checkpoint.*2, all damaged") as caught:
            checkpointer(tmp_path).restore(resume)
        assert caught.value.exit_code == 65
    assert contents(tmp_path) == before


def test_a_look_at_a_checkpoint_changes_nothing(two_checkpoints, tmp_path, capfd):
    original, values = two_checkpoints
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    model = make()
    seeds = [layer.seed_generator.state.numpy() for layer in model.layers if hasattr(layer, "seed_generator")]
    reader = checkpointer(tmp_path, model)
    everything = [*model.variables, *model.optimizer.variables]
    weights = [i for i, each in enumerate(everything) if any(each is weight for weight in model.weights)]
    for path, step in ((tmp_path / "step-00000001", 1), (None, 2)):
        assert reader.load(path).step == step
        assert same([everything[i].numpy() for i in weights], [values[step][i] for i in weights])
    assert all(
        np.array_equal(layer.seed_generator.state.numpy(), seed)
        for layer, seed in zip([each for each in model.layers if hasattr(each, "seed_generator")], seeds, strict=True)
    )
    assert contents(tmp_path) == before
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    assert reader.load().step == 1
    assert "step-00000002 is damaged" in capfd.readouterr().err
    with pytest.raises(JobError, match=r"there must be a checkpoint. Received: none in .*nothing"):
        reader.load(tmp_path / "nothing")


def test_what_resume_means(two_checkpoints, tmp_path):
    original, values = two_checkpoints
    folder = tmp_path / "checkpoints"
    assert checkpointer(folder).restore("auto") is None
    assert checkpointer(folder).restore("never") is None
    with pytest.raises(JobError, match="must needs a checkpoint"):
        checkpointer(folder).restore("must")
    shutil.copytree(original, folder)
    with pytest.raises(JobError, match="never needs a place without checkpoints"):
        checkpointer(folder).restore("never")
    model = make()
    assert checkpointer(folder, model).restore("auto").state == {"best": 0.25}
    assert same(all_values(model), values[2])
    # By name, from another folder, and as a run's folder.
    for path, step in ((original / "step-00000001", 1), (original, 2), (original.parent, 2)):
        assert checkpointer(tmp_path / "new", model).restore(path).step == step
        assert same(all_values(model), values[step])
    with pytest.raises(JobError, match="needs a place of its own"):
        checkpointer(folder).restore(original)
    with pytest.raises(JobError, match="there is no checkpoint"):
        checkpointer(folder).restore(tmp_path / "nowhere")


def test_later_ones_are_set_aside_again_and_again(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints[0], tmp_path, dirs_exist_ok=True)
    for number in (1, 2):
        saver = checkpointer(tmp_path)
        assert saver.restore(tmp_path / "step-00000001").step == 1
        assert (tmp_path / f"step-00000002.aside{number}").is_dir()
        saver.save(2, wait=True)


@pytest.mark.parametrize("what", ["model", "optimizer", "random", "identity"])
def test_another_run_is_refused(what, tmp_path):
    checkpointer(tmp_path).save(1, identity={"seed": 1}, wait=True)
    model = {
        "model": lambda: make(units=5),
        "optimizer": lambda: make(optimizer=keras.optimizers.SGD()),
        "random": lambda: without_dropout(),
        "identity": make,
    }[what]()
    before = contents(tmp_path)
    with pytest.raises(JobError, match=r"a checkpoint of another run, .*seed: 1 there, 2 here|of the same model"):
        checkpointer(tmp_path, model).restore(identity={"seed": 2 if what == "identity" else 1})
    assert contents(tmp_path) == before


def without_dropout() -> keras.Model:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    return model


def test_from_a_newer_version(two_checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FORMAT", 2)
    checkpointer(tmp_path).save(1, wait=True)
    monkeypatch.undo()
    before = contents(tmp_path)
    with pytest.raises(JobError, match=r"must be of format 1 or earlier. Received: .*step-00000001, of format 2"):
        checkpointer(tmp_path).restore()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["a file", "foreign"])
def test_places_where_checkpoints_must_not_go(kind, tmp_path):
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(JobError, match=r"It was left untouched|a file") as caught:
        checkpointer(place).restore()
    assert caught.value.exit_code == 65
    with pytest.raises(JobError, match=r"It was left untouched|a file"):
        checkpointer(place).save(1)
    assert contents(tmp_path) == before


def test_only_our_own_are_deleted(tmp_path):
    saver = checkpointer(tmp_path, keep=2)
    saver.save(1, wait=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-00000001.aside1").mkdir()
    (tmp_path / ".step-00000009.writing").mkdir()  # of a save that was killed
    for step in (2, 3, 4):
        saver.save(step, wait=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000001.aside1", "step-00000003", "step-00000004", "step-by-step"]
    with pytest.raises(UsageError, match="keep must be at least 1"):
        checkpointer(tmp_path, keep=0)


def test_failed_writes_are_told_counted_and_forgiven(tmp_path, monkeypatch, capfd):
    saver = checkpointer(tmp_path)
    saver.save(1, wait=True)
    before, sync_folder = contents(tmp_path), folders.sync_folder

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "sync_folder", full)
    for step in (2, 3):
        saver.save(step)
        saver.wait()
    told = capfd.readouterr().err
    assert told.count("a checkpoint could not be written") == 2
    assert "No space left on device" in told
    monkeypatch.setattr(folders, "sync_folder", sync_folder)
    saver.save(4, wait=True)  # there is room again
    monkeypatch.setattr(folders, "sync_folder", full)
    for step in (5, 6, 7):
        saver.save(step)
    saver.wait()
    with pytest.raises(JobError, match=r"3 failures in a row.*No space left") as caught:
        saver.save(8)
    assert caught.value.exit_code == 65
    after = contents(tmp_path)
    assert all(after[name] == before[name] for name in before)
    assert [each.name for each in folders.checkpoints_in(tmp_path)] == ["step-00000001", "step-00000004"]


def test_what_is_read_back_is_compared(tmp_path, monkeypatch):
    sync_folder = folders.sync_folder

    def break_first(folder):
        data = folder / "state.data-00000-of-00001"
        content = bytearray(data.read_bytes())
        content[5] ^= 1
        data.write_bytes(content)
        sync_folder(folder)

    monkeypatch.setattr(folders, "sync_folder", break_first)
    with pytest.raises(JobError, match="failures in a row"):
        checkpointer(tmp_path).save(1, wait=True)
    assert not folders.checkpoints_in(tmp_path)


def test_a_read_only_file_system(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        saver = checkpointer(tmp_path)
        saver.save(1, wait=True)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(JobError, match="Read-only file system") as caught:
            saver.save(2, wait=True)
        assert caught.value.exit_code == 65
        assert checkpointer(tmp_path).restore().step == 1
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_dtypes_and_random_states_keep_their_bits(tmp_path):
    class Many(layers.Layer):
        def build(self, shape):
            for dtype in ("float16", "bfloat16", "float64", "int32", "int64", "uint32", "bool", "int8"):
                self.add_weight(shape=(3,), dtype=dtype, initializer="ones", trainable=False, name=dtype)
            self.add_weight(shape=(2, 1), name="kernel", initializer="normal")

        def call(self, x):
            return x @ self.kernel if hasattr(self, "kernel") else x @ self.trainable_weights[0]

    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((2,)), Many()])
    model.compile(optimizer="sgd", loss="mse")
    model.train_on_batch(X[:, :2], Y[:, :1])
    for variable in model.weights:
        variable.assign(tf.cast(np.arange(np.prod(variable.shape)).reshape(variable.shape), variable.dtype))
    before = all_values(model)
    random.random()
    np.random.normal()
    keras.random.normal((2,))
    state = random_state.capture()
    checkpointer(tmp_path, model).save(1, wait=True)
    drawn = random.random(), np.random.normal(), random.gauss(0, 1), float(keras.random.normal(()))
    for variable in model.weights:
        variable.assign(tf.zeros_like(variable.value))
    checkpointer(tmp_path, model).restore()
    assert same(before, all_values(model))
    assert (random.random(), np.random.normal(), random.gauss(0, 1), float(keras.random.normal(()))) == drawn
    random_state.restore(state)
    assert random.random() == drawn[0]


def test_nested_values_keep_their_kind():
    value = {
        "a": [1, 2.5, True, None, "text", float("inf")],
        "b": (np.float32(0.1), np.arange(3)),
        "c": {"d": {3, 1}, "e": {}},
        "f": [],
    }
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(tree.split(value, arrays, "state"))
    back = tree.join(json.loads(text), arrays)
    assert back["a"] == value["a"]
    assert back["b"][0] == np.float32(0.1)
    assert back["b"][1].dtype == np.arange(3).dtype
    assert (back["c"], back["f"], type(back["b"])) == (value["c"], [], tuple)
    assert tree.is_plain(value)
    assert not any(tree.is_plain(each) for each in (object(), [object()], {1: 2}, np.array(["a"])))


def test_a_schedule_and_its_step_go_on(tmp_path):
    schedule = lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    model = make(optimizer=keras.optimizers.SGD(schedule()))
    for _ in range(4):
        model.train_on_batch(X, Y)
    checkpointer(tmp_path, model).save(4, wait=True)
    other = make(optimizer=keras.optimizers.SGD(schedule()))
    checkpointer(tmp_path, other).restore()
    assert float(other.optimizer.learning_rate) == float(model.optimizer.learning_rate)
