"""Checkpoints that are damaged, foreign or in unusual places: reported, and never deleted unasked."""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensorflow as tf
from small_checkpoints import X, Y, all_values, checkpointer, contents, make, names_in, same

from hvdtrain.checkpoint import draft, storage
from hvdtrain.errors import JobError


def files_of_a_checkpoint() -> list[str]:
    return ["SHA256SUMS", "manifest.json", "ranks.safetensors", "state.data-00000-of-00001", "state.index"]


@pytest.mark.parametrize("kind", ["first bit", "middle bit", "last bit", "truncated", "empty", "missing"])
@pytest.mark.parametrize("name", files_of_a_checkpoint())
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_restored(name, kind, two_checkpoints, tmp_path, capfd):
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
    reported = capfd.readouterr().err
    assert "step-00000002 is damaged: " in reported
    assert name in reported
    assert (folder / "step-00000002.aside1").is_dir()
    # The run saves step 2 again.
    saver = checkpointer(folder, model, keep=1)
    saver.save(2, wait=True)
    assert [each.name for each in storage.checkpoints_in(folder)] == ["step-00000002"]


def test_a_large_state_is_written_to_several_files(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(draft, "_MIN_FILE_BYTES", 1)
    model = make()
    saver = checkpointer(tmp_path, model)
    saver.save(1, wait=True)
    first = all_values(model)
    model.train_on_batch(X, Y)
    saver.save(2, wait=True)
    second = all_values(model)
    data = sorted((tmp_path / "step-00000002").glob("state.data-*"))
    num_tensors = len(tf.train.list_variables(tmp_path / "step-00000002" / "state"))
    assert 4 <= len(data) <= draft._MAX_FILES < num_tensors
    assert names_in(tmp_path / "step-00000002") == sorted(
        ["SHA256SUMS", "manifest.json", "ranks.safetensors", "state.index", *(each.name for each in data)]
    )
    restored = make()
    assert checkpointer(tmp_path, restored).restore("must").step == 2
    assert same(all_values(restored), second)
    content = bytearray(data[-1].read_bytes())
    content[-1] ^= 1
    data[-1].write_bytes(content)
    assert checkpointer(tmp_path, restored).restore("must").step == 1
    assert same(all_values(restored), first)
    assert f"step-00000002 is damaged: {data[-1].name} does not match SHA256SUMS" in capfd.readouterr().err


def rewrite_sums(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(
        storage.sums(folder, [each for each in files_of_a_checkpoint() if "SUM" not in each])
    )


MALFORMED = {
    "not JSON": lambda manifest: "{",
    "bytes that are no text": lambda manifest: "\udcff",
    "not an object": lambda manifest: [manifest],
    "null": lambda manifest: None,
    "no step": lambda manifest: {**manifest, "step": None},
    "another step": lambda manifest: {**manifest, "step": 7},
    "format": lambda manifest: {**manifest, "format": "one"},
    "variables": lambda manifest: {**manifest, "variables": [["name", "shape", 5]]},
    "an unknown tensor": lambda manifest: {**manifest, "variables": [["model/none", [1], "float32"]]},
    "own": lambda manifest: {**manifest, "own": None},
    "parts": lambda manifest: {
        **manifest,
        "own": {**manifest["own"], "parts": [[manifest["variables"][0][0], [5], "float32"]]},
    },
    "parts of nothing": lambda manifest: {**manifest, "own": {**manifest["own"], "parts": [["none", [32], "float32"]]}},
    "ranks": lambda manifest: {**manifest, "ranks": 3},
    "kept": lambda manifest: {**manifest, "kept": {"state": 5}},
    "identity": lambda manifest: {**manifest, "kept": {**manifest["kept"], "identity": 5}},
    "deep nesting": lambda manifest: "[" * 100_000,
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_manifest_that_hvdtrain_did_not_write_is_damaged(kind, two_checkpoints, tmp_path, capfd):
    shutil.copytree(two_checkpoints[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000002" / "manifest.json"
    changed = MALFORMED[kind](json.loads(path.read_text()))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    path.write_bytes(text.encode(errors="surrogateescape"))
    rewrite_sums(path.parent)
    assert checkpointer(tmp_path).restore("must").step == 1
    assert "step-00000002 is damaged: manifest.json is not as hvdtrain writes it" in capfd.readouterr().err


def test_files_that_are_not_of_the_checkpoint_are_ignored(two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints[0], tmp_path, dirs_exist_ok=True)
    for name in (".DS_Store", ".nfs000000000000000100000001"):
        (tmp_path / "step-00000002" / name).write_text("mine")
    assert checkpointer(tmp_path).restore().step == 2


@contextmanager
def without_privileges():
    """Root may read everything."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_an_unreadable_checkpoint_is_skipped_and_an_unreadable_folder_refused(two_checkpoints, capfd):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(two_checkpoints[0], folder / "checkpoints")
        (folder / "checkpoints" / "step-00000002").chmod(0)
        saver = checkpointer(folder / "checkpoints")
        with without_privileges():
            assert saver.load().step == 1
        assert "step-00000002 is damaged: [Errno 13] Permission denied" in capfd.readouterr().err
        (folder / "checkpoints").chmod(0)
        with without_privileges(), pytest.raises(JobError, match="must be readable and writable") as caught:
            saver.restore()
        assert caught.value.exit_code == 65
        (folder / "checkpoints").chmod(0o755)
        (folder / "checkpoints" / "step-00000002").chmod(0o755)


def test_old_checkpoints_that_are_links_or_cannot_be_deleted(two_checkpoints, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints[0], folder)
    (folder / "step-00000001").rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(tmp_path / "elsewhere")
    saver = checkpointer(folder, keep=1)
    saver.restore()
    saver.save(3, wait=True)
    assert names_in(folder) == ["step-00000003"]
    assert storage.damage(tmp_path / "elsewhere") is None
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name) / "checkpoints"
        shutil.copytree(two_checkpoints[0], shared)
        Path(name).chmod(0o755)
        shared.chmod(0o777)
        with without_privileges():
            storage.delete_all_but(shared, 1)
        assert names_in(shared) == ["step-00000001", "step-00000002"] if os.geteuid() == 0 else ["step-00000002"]


@pytest.mark.parametrize("name", ["a[b", "a]b", "a\\b", "a*b?c", "[x]{y}", " spaces and ünicode "])
def test_any_character_in_the_path(name, tmp_path):
    model = make()
    saver = checkpointer(tmp_path / name / "checkpoints", model)
    saver.save(1, wait=True)
    before = all_values(model)
    model.train_on_batch(X, Y)
    assert checkpointer(tmp_path / name / "checkpoints", model).restore().step == 1
    assert same(before, all_values(model))


def test_all_damaged(two_checkpoints, tmp_path):
    original, _ = two_checkpoints
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    for folder in storage.checkpoints_in(tmp_path):
        (folder / "manifest.json").write_text("{}")
    before = contents(tmp_path)
    for resume in ("auto", "must"):
        with pytest.raises(JobError, match=r"there must be an intact checkpoint.*2, all damaged") as caught:
            checkpointer(tmp_path).restore(resume)
        assert caught.value.exit_code == 65
    assert contents(tmp_path) == before


def test_a_checkpoint_of_a_newer_version_is_refused(two_checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FORMAT", 2)
    checkpointer(tmp_path).save(1, wait=True)
    monkeypatch.undo()
    before = contents(tmp_path)
    with pytest.raises(JobError, match=r"must have format 1 or earlier. Received: .*step-00000001, format 2"):
        checkpointer(tmp_path).restore()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["a file", "foreign"])
def test_unsuitable_folders_are_refused(kind, tmp_path):
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


@pytest.mark.parametrize("name", files_of_a_checkpoint())
def test_no_fifo_in_a_checkpoint_is_waited_for(name, two_checkpoints, tmp_path, capfd):
    shutil.copytree(two_checkpoints[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "step-00000002" / name).unlink()
    os.mkfifo(tmp_path / "step-00000002" / name)
    assert checkpointer(tmp_path).load().step == 1
    assert f"{name}" in capfd.readouterr().err


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside(tmp_path):
    saver = checkpointer(tmp_path)
    saver.restore()
    saver.save(2, wait=True)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    saver.save(2, wait=True)
    assert storage.damage(tmp_path / "step-00000002") is None
    assert (tmp_path / "step-00000002.aside1").is_dir()


def test_a_leftover_that_cannot_be_deleted_does_not_fail_a_save(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / ".step-00000001.deleting").mkdir()
    monkeypatch.setattr(storage, "remove", refuse)
    storage.delete_all_but(tmp_path, 1)
