"""Atomic replacement of files and folders."""

from pathlib import Path

import pytest

from hvdtrain.system import atomic_files


def test_does_not_sync_other_files_of_the_folder(tmp_path, monkeypatch):
    """They may be large, as checkpoints in a run directory are, or another thread may delete them."""
    synced: list[Path] = []
    sync = atomic_files.sync
    monkeypatch.setattr(atomic_files, "sync", lambda path: (synced.append(path), sync(path)))
    (tmp_path / "checkpoints").mkdir()
    atomic_files.write_text(tmp_path / "config.json", "{}")
    assert synced == [tmp_path / ".writing-config.json"]


@pytest.mark.parametrize("fails", ["block", "verify"])
def test_keeps_the_old_content_on_failure(tmp_path, fails):
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    def replace() -> None:
        with atomic_files.replaced_on_success(path, verify=fail if fails == "verify" else None) as unfinished:
            unfinished.write_text("new")
            if fails == "block":
                fail(unfinished)

    path = tmp_path / "config.json"
    atomic_files.write_text(path, "old")
    with pytest.raises(OSError, match="No space"):
        replace()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("config.json", "old")]
