"""Checkpoints on one rank: complete or absent, bit-identical when restored."""

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
from small_checkpoints import X, Y, all_values, checkpointer, contents, make, names_in, same

from hvdtrain.checkpoint import plain_values, random_state, storage
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.draft import Draft
from hvdtrain.errors import JobError, UsageError
from hvdtrain.system import atomic_files


def test_a_save_captures_the_values_at_its_call(tmp_path, monkeypatch):
    """Training continues while the thread writes: the written values must not change."""
    import threading

    model = make()
    saver = checkpointer(tmp_path, model)
    before, may_write, commit = all_values(model), threading.Event(), Draft.commit
    monkeypatch.setattr(Draft, "commit", lambda *arguments: (may_write.wait(), commit(*arguments)))
    saver.save(1)
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert not same(before, all_values(model))
    may_write.set()
    saver.wait()
    checkpointer(tmp_path, model).restore()
    assert same(before, all_values(model))


def test_tensorflow_and_sha256sum_can_read_it(two_checkpoints):
    folder, values = two_checkpoints
    manifest = json.loads((folder / "step-00000002" / "manifest.json").read_text())
    kernel = manifest["variables"][0][0]
    assert re.fullmatch(r"model/sequential(_\d+)?/dense(_\d+)?/kernel", kernel)
    assert np.array_equal(tf.train.load_variable(str(folder / "step-00000002" / "state"), kernel), values[2][0])
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder / "step-00000002", capture_output=True)
    assert done.returncode == 0, done.stderr


def test_loading_a_checkpoint_changes_nothing_else(two_checkpoints, tmp_path, capfd):
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


def test_values_of_resume(two_checkpoints, tmp_path):
    original, values = two_checkpoints
    folder = tmp_path / "checkpoints"
    assert checkpointer(folder).restore("auto") is None
    assert checkpointer(folder).restore("never") is None
    with pytest.raises(JobError, match="resume='must' requires a checkpoint"):
        checkpointer(folder).restore("must")
    shutil.copytree(original, folder)
    with pytest.raises(JobError, match="resume='never' requires a folder without checkpoints"):
        checkpointer(folder).restore("never")
    model = make()
    assert checkpointer(folder, model).restore("auto").state == {"best": 0.25}
    assert same(all_values(model), values[2])
    # By path, from another folder, and from a run's folder.
    for path, step in ((original / "step-00000001", 1), (original, 2), (original.parent, 2)):
        assert checkpointer(tmp_path / "new", model).restore(path).step == step
        assert same(all_values(model), values[step])
    with pytest.raises(JobError, match="requires its own folder"):
        checkpointer(folder).restore(original)
    with pytest.raises(JobError, match="which holds no checkpoint"):
        checkpointer(folder).restore(tmp_path / "nowhere")


def test_later_checkpoints_are_renamed_each_time(two_checkpoints, tmp_path):
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
    with pytest.raises(JobError, match=r"one of another run, .*seed: 1 in the checkpoint, 2 here|of the same model"):
        checkpointer(tmp_path, model).restore(identity={"seed": 2 if what == "identity" else 1})
    assert contents(tmp_path) == before


def test_the_identity_of_the_constructor_is_added_to_that_of_each_call(tmp_path):
    checkpointer(tmp_path, identity={"seed": 1}).save(1, identity={"task": "digits"}, wait=True)
    with pytest.raises(JobError, match=r"seed: 1 in the checkpoint, 2 here; task: digits in .*, missing here"):
        checkpointer(tmp_path, identity={"seed": 2}).restore()
    with pytest.raises(JobError, match=r": seed: 1 in the checkpoint, 2 here\."):
        checkpointer(tmp_path, identity={"seed": 1}).restore(identity={"task": "digits", "seed": 2})
    assert checkpointer(tmp_path, identity={"seed": 1}).restore(identity={"task": "digits"}).step == 1
    assert checkpointer(tmp_path).restore(identity={"task": "digits", "seed": 1}).step == 1


def without_dropout() -> keras.Model:
    model = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    return model


def test_only_own_checkpoints_are_deleted(tmp_path):
    saver = checkpointer(tmp_path, keep=2)
    saver.save(1, wait=True)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / "step-00000001.aside1").mkdir()
    (tmp_path / ".step-00000009.writing").mkdir()  # an interrupted save
    for step in (2, 3, 4):
        saver.save(step, wait=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000001.aside1", "step-00000003", "step-00000004", "step-by-step"]
    with pytest.raises(UsageError, match="keep must be at least 1"):
        checkpointer(tmp_path, keep=0)


def bias_on_disk(folder: Path, step: int) -> float:
    manifest = json.loads((folder / f"step-{step:08d}" / "manifest.json").read_text())
    name = next(each[0] for each in manifest["variables"] if each[0].endswith("/bias"))
    return float(tf.train.load_variable(str(folder / f"step-{step:08d}" / "state"), name)[0])


def save_with_bias(saver: Checkpointer, model: keras.Model, step: int, bias: float) -> None:
    model.layers[0].bias.assign(np.full(4, bias))
    saver.save(step, wait=True)


def test_without_restore_a_save_sets_aside_the_checkpoints_of_another_run(tmp_path, capfd):
    model = make()
    saver = checkpointer(tmp_path, model)
    for step in (50, 200, 900):
        save_with_bias(saver, model, step, 1.0)
    before = contents(tmp_path)
    saver = checkpointer(tmp_path, model, keep=2)
    save_with_bias(saver, model, 50, 2.0)
    assert "without resuming: renamed its checkpoints step-00000050, step-00000200" in capfd.readouterr().err
    asides = [f"step-{step:08d}.aside1" for step in (50, 200, 900)]
    assert names_in(tmp_path) == ["step-00000050", *asides]
    assert bias_on_disk(tmp_path, 50) == 2.0
    assert {
        name.replace(".aside1", ""): content for name, content in contents(tmp_path).items() if "aside" in name
    } == (before)
    save_with_bias(saver, model, 60, 3.0)  # its own are not set aside
    assert names_in(tmp_path) == ["step-00000050", *asides[:1], "step-00000060", *asides[1:]]
    # To load a checkpoint is not to continue its run.
    other = checkpointer(tmp_path, model)
    other.load()
    save_with_bias(other, model, 70, 4.0)
    assert [each.name for each in storage.checkpoints_in(tmp_path)] == ["step-00000070"]


def test_a_save_replaces_the_checkpoint_of_the_same_step_and_sets_aside_later_ones(tmp_path, capfd):
    model = make()
    saver = checkpointer(tmp_path, model, keep=1)
    save_with_bias(saver, model, 100, 1.0)
    save_with_bias(saver, model, 100, 2.0)
    assert (names_in(tmp_path), bias_on_disk(tmp_path, 100)) == (["step-00000100"], 2.0)
    save_with_bias(saver, model, 50, 3.0)
    assert names_in(tmp_path) == ["step-00000050", "step-00000100.aside1"]
    assert "step 50 is now the latest: renamed the later checkpoint" in capfd.readouterr().err
    other = checkpointer(tmp_path, model, keep=1)
    assert other.restore().step == 50
    save_with_bias(other, model, 50, 4.0)
    assert (names_in(tmp_path), bias_on_disk(tmp_path, 50)) == (["step-00000050", "step-00000100.aside1"], 4.0)


def test_a_checkpoint_with_the_same_content_is_not_written_again(tmp_path, monkeypatch):
    saver = checkpointer(tmp_path)
    saver.save(1, wait=True)
    inode = (tmp_path / "step-00000001").stat().st_ino
    saver.save(1, wait=True)
    assert (tmp_path / "step-00000001").stat().st_ino == inode
    saver.save(1, state="changed", wait=True)
    assert (tmp_path / "step-00000001").stat().st_ino != inode


@pytest.mark.parametrize("new_is_in_place", [False, True])
def test_an_interrupted_replacement_is_completed(new_is_in_place, tmp_path):
    model = make()
    save_with_bias(checkpointer(tmp_path, model), model, 1, 1.0)
    old, replaced = tmp_path / "step-00000001", tmp_path / ".step-00000001.replaced"
    if new_is_in_place:
        shutil.copytree(old, replaced)
    else:
        old.rename(replaced)
    saver = checkpointer(tmp_path, model)
    assert saver.restore().step == 1
    assert names_in(tmp_path) == ["step-00000001"]


def test_failed_writes_are_reported_and_counted_until_one_succeeds(tmp_path, monkeypatch, capfd):
    saver = checkpointer(tmp_path)
    saver.save(1, wait=True)
    before, sync = contents(tmp_path), atomic_files.sync

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "sync", full)
    for step in (2, 3):
        saver.save(step)
        saver.wait()
    reported = capfd.readouterr().err
    assert reported.count("could not write a checkpoint") == 2
    assert "No space left on device" in reported
    monkeypatch.setattr(atomic_files, "sync", sync)
    saver.save(4, wait=True)  # space is free again
    monkeypatch.setattr(atomic_files, "sync", full)
    for step in (5, 6, 7):
        saver.save(step)
    saver.wait()
    with pytest.raises(JobError, match=r"3 consecutive failures.*No space left") as caught:
        saver.save(8)
    assert caught.value.exit_code == 65
    after = contents(tmp_path)
    assert all(after[name] == before[name] for name in before)
    assert [each.name for each in storage.checkpoints_in(tmp_path)] == ["step-00000001", "step-00000004"]


def test_a_write_is_verified_by_reading_it_back(tmp_path, monkeypatch):
    sync = atomic_files.sync

    def break_first(folder):
        if folder.is_dir():
            data = folder / "state.data-00000-of-00001"
            content = bytearray(data.read_bytes())
            content[5] ^= 1
            data.write_bytes(content)
        sync(folder)

    monkeypatch.setattr(atomic_files, "sync", break_first)
    with pytest.raises(JobError, match="consecutive failures"):
        checkpointer(tmp_path).save(1, wait=True)
    assert not storage.checkpoints_in(tmp_path)


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


def test_dtypes_and_random_states_are_bit_identical(tmp_path):
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


def test_nested_values_keep_their_types():
    value = {
        "a": [1, 2.5, True, None, "text", float("inf")],
        "b": (np.float32(0.1), np.arange(3)),
        "c": {"d": {3, 1}, "e": {}},
        "f": [],
    }
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(plain_values.split(value, arrays, "state"))
    back = plain_values.join(json.loads(text), arrays)
    assert back["a"] == value["a"]
    assert back["b"][0] == np.float32(0.1)
    assert back["b"][1].dtype == np.arange(3).dtype
    assert (back["c"], back["f"], type(back["b"])) == (value["c"], [], tuple)
    assert plain_values.is_plain(value)
    assert not any(plain_values.is_plain(each) for each in (object(), [object()], {1: 2}, np.array(["a"])))


def test_a_learning_rate_schedule_resumes_at_its_step(tmp_path):
    schedule = lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    model = make(optimizer=keras.optimizers.SGD(schedule()))
    for _ in range(4):
        model.train_on_batch(X, Y)
    checkpointer(tmp_path, model).save(4, wait=True)
    other = make(optimizer=keras.optimizers.SGD(schedule()))
    checkpointer(tmp_path, other).restore()
    assert float(other.optimizer.learning_rate) == float(model.optimizer.learning_rate)
