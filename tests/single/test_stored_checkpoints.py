"""Checkpoints in an object store: complete or absent there too, and bit-identical on another machine."""

import json
import shutil
import time

import pytest
from small_checkpoints import X, Y, all_values, checkpointer, make, same

from hvdtrain.checkpoint.folders import StoredFolder, newest_manifest
from hvdtrain.errors import JobError, StoreError
from hvdtrain.stores.store import Store
from hvdtrain.system import transfers


def names_in_store(url: str) -> set[str]:
    """The names of the checkpoints in a store, complete or not."""
    return {name.partition("/")[0] for name in Store(url).files() if "/" in name}


def save(saver, model, *steps: int) -> dict[int, list]:
    values = {}
    for step in steps:
        model.train_on_batch(X, Y)
        values[step] = all_values(model)
        saver.save(step, state={"step": step}, wait=True)
    return values


def restored(url: str, resume="auto"):
    model = make()
    found = checkpointer(url, model).restore(resume)
    return (None if found is None else found.step), all_values(model)


@pytest.fixture
def operations(monkeypatch):
    """What is written to the store, in order."""
    done = []
    for name in ("upload", "delete", "copy"):
        original = getattr(Store, name)

        def recorded(self, *arguments, name=name, original=original):
            done.append((name, arguments[-1]))
            return original(self, *arguments)

        monkeypatch.setattr(Store, name, recorded)
    return done


def test_a_job_resumes_on_another_machine(url, cache, operations):
    model, saved = make(), []
    saver = checkpointer(url, model, keep=2, after_save=lambda: saved.append(StoredFolder(url).newest_step()))
    assert saver.restore() is None
    values = save(saver, model, 1, 2, 3)
    assert saved == [1, 2, 3]
    assert names_in_store(url) == {"step-00000002", "step-00000003"}
    of_3 = [name for operation, name in operations if operation == "upload" and name.startswith("step-00000003/")]
    assert len(of_3) == 5
    assert of_3[-1] == "step-00000003/SHA256SUMS"
    deleted = [name for operation, name in operations if operation == "delete"]
    assert len(deleted) == 5
    assert deleted[0] == "step-00000001/SHA256SUMS"
    assert {name.partition("/")[0] for name in deleted} == {"step-00000001"}
    cache("empty disk")
    model = make()
    saver = checkpointer(url, model, keep=2)
    assert saver.restore().state == {"step": 3}
    assert same(all_values(model), values[3])
    # keep counts what is in the store, not only what was downloaded.
    save(saver, model, 4)
    assert names_in_store(url) == {"step-00000003", "step-00000004"}
    assert checkpointer(url, make()).load().step == 4
    assert newest_manifest(url)[1]["step"] == 4


def test_a_damaged_checkpoint_is_skipped_and_an_incomplete_one_is_none(url, cache, capfd):
    model = make()
    saver = checkpointer(url, model)
    values = save(saver, model, 1, 2, 3)
    store = Store(url)
    store.delete("step-00000003/SHA256SUMS")
    content = bytearray(store.read("step-00000002/manifest.json"))
    content[10] ^= 1
    store.write("step-00000002/manifest.json", bytes(content))
    assert StoredFolder(url).newest_step() == 2
    cache("empty disk")
    step, found = restored(url)
    assert step == 1
    assert same(found, values[1])
    output = capfd.readouterr().err
    assert f"{url}/step-00000002 is damaged: manifest.json does not match SHA256SUMS" in output
    assert names_in_store(url) == {"step-00000001", "step-00000002.aside1", "step-00000003.aside1"}
    store.write("step-00000001/manifest.json", b"{}")
    cache("another empty disk")
    with pytest.raises(JobError, match=r"there must be an intact checkpoint in .*Received: 1, all damaged") as caught:
        restored(url)
    assert caught.value.exit_code == 65


def test_what_a_store_moves_is_noted_as_progress(s3_url, tmp_path):
    """Downloads part by part: a large file may take longer than the stall timeout."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    noted = []
    for move in (Store(s3_url).upload, lambda path, name: Store(s3_url).download(name, path)):
        before = transfers.count()
        move(tmp_path / "file", "name")
        noted.append(transfers.count() - before)
    assert noted[0] >= 1
    assert noted[1] > 8


def test_a_save_that_waits_for_a_slow_store_says_so_once(s3_url, cache, monkeypatch, capfd):
    monkeypatch.setattr("hvdtrain.checkpoint.checkpointer._NOTEWORTHY_WAIT_S", 0.2)
    upload = Store.upload

    def slow(self, path, name):
        time.sleep(0.1)
        upload(self, path, name)

    monkeypatch.setattr(Store, "upload", slow)
    model = make()
    saver = checkpointer(s3_url, model)
    for step in (1, 2, 3):
        saver.save(step)
    saver.wait()
    lines = [line for line in capfd.readouterr().err.splitlines() if "the checkpoint before was written" in line]
    assert len(lines) == 1
    assert "step 2 waited" in lines[0]
    assert f"was written to {s3_url}" in lines[0]


def test_a_failing_store_is_reported_and_tried_again(url, cache, monkeypatch, capfd):
    model = make()
    saver = checkpointer(url, model)
    save(saver, model, 1)
    upload, failures = Store.upload, [2]

    def failing(self, path, name):
        if failures[0]:
            failures[0] -= 1
            raise StoreError("no route to the store")
        upload(self, path, name)

    monkeypatch.setattr(Store, "upload", failing)
    values = save(saver, model, 2)  # which waits, and therefore tries three times
    assert capfd.readouterr().err.count(f"could not write a checkpoint to {url}: no route to the store") == 2
    assert StoredFolder(url).newest_step() == 2
    failures[0] = 3
    for step in (3, 4, 5):
        model.train_on_batch(X, Y)
        values[step] = all_values(model)
        saver.save(step)
    saver.wait()
    with pytest.raises(JobError, match=f"3 consecutive failures in {url}, the last: no route to the store") as caught:
        saver.save(6)
    assert caught.value.exit_code == 65
    # What is on this disk and not in the store is not lost: the same machine resumes from it.
    assert StoredFolder(url).newest_step() == 2
    step, found = restored(url)
    assert step == 5
    assert same(found, values[5])
    cache("empty disk")
    step, found = restored(url)
    assert step == 2
    assert same(found, values[2])


@pytest.mark.slow
def test_the_store_decides_which_run_it_is(s3_url, cache, capfd):
    url = s3_url
    first = cache("first")
    model = make()
    save(checkpointer(url, model), model, 1, 2)
    cache("second")
    model = make()
    saver = checkpointer(url, model)
    assert saver.restore().step == 2
    values = save(saver, model, 3)
    cache("first")
    step, found = restored(url)
    assert step == 3
    assert same(found, values[3])
    assert "has another latest checkpoint, step-00000003: moved the local copy" in capfd.readouterr().err
    for name in Store(url).files():
        Store(url).delete(name)
    assert restored(url)[0] is None
    assert "holds no checkpoint: moved the local copy" in capfd.readouterr().err
    assert list(first.rglob("*.aside/step-00000003/SHA256SUMS"))


@pytest.mark.slow
def test_two_jobs_do_not_write_to_one_url(s3_url, cache):
    url = s3_url
    model = make()
    saver = checkpointer(url, model)
    saver.restore()
    save(saver, model, 1)
    cache("second")
    other = checkpointer(url, make())
    assert other.restore().step == 1
    files = Store(url).files()
    with pytest.raises(
        JobError, match=rf"another job has been writing to {url} since .*, on host .*use another folder"
    ):
        save(saver, model, 2)
    assert Store(url).files() == files
    assert json.loads(Store(url).read("writer.json"))["host"]


@pytest.mark.slow
def test_named_checkpoints(s3_url, cache, tmp_path):
    url = s3_url
    model = make()
    saver = checkpointer(f"{url}/checkpoints", model)
    values = save(saver, model, 1, 2, 3)
    for name in (url, f"{url}/checkpoints", f"{url}/checkpoints/step-00000003"):
        other = make()
        assert checkpointer(tmp_path / name.replace("/", "-"), other).restore(name).step == 3
        assert same(all_values(other), values[3])
        assert checkpointer(tmp_path / "none", make()).load(name).step == 3
    assert not list((cache("cache") / "reading").iterdir())
    cache("empty disk")
    with pytest.raises(JobError, match=f"Received: none in {url}/checkpoints/step-00000009"):
        restored(f"{url}/checkpoints", f"{url}/checkpoints/step-00000009")
    with pytest.raises(JobError, match=f"Received: {url}/nothing, which holds no checkpoint"):
        restored(f"{url}/checkpoints", f"{url}/nothing")
    # One of its own: the later ones are renamed there too.
    step, found = restored(f"{url}/checkpoints", f"{url}/checkpoints/step-00000001")
    assert step == 1
    assert same(found, values[1])
    later = {"step-00000002.aside1", "step-00000003.aside1"}
    assert names_in_store(f"{url}/checkpoints") == {"step-00000001", *later}
    # Saved without restoring: all that the store holds is of another run.
    other = make()
    save(checkpointer(f"{url}/checkpoints", other), other, 1)
    assert names_in_store(f"{url}/checkpoints") == {"step-00000001", "step-00000001.aside1", *later}


@pytest.mark.slow
def test_a_damaged_local_copy_is_downloaded_again(s3_url, cache):
    url = s3_url
    model = make()
    values = save(checkpointer(url, model), model, 1)
    (manifest,) = cache("cache").rglob("manifest.json")
    manifest.write_text("{}")
    step, found = restored(url)
    assert step == 1
    assert same(found, values[1])
    shutil.rmtree(cache("cache"))
    assert restored(url)[0] == 1
