"""The memory that a process can still use is that which the limits of its control groups leave."""

from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.system import memory

FREE = 64 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    monkeypatch.setattr(memory, "_MOUNT", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own groups")


def write(folder, names, limit, used=0, cache=0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nunevictable 7\n")


def test_without_control_groups(tmp_path):
    assert memory.available_bytes() == FREE


@pytest.mark.parametrize(
    ("names", "line", "root"),
    [(V2, "0::", ""), (V1, "4:cpu,cpuacct:/\n3:memory:", "memory")],
    ids=["version 2", "version 1"],
)
def test_the_narrowest_limit_around_the_process_counts(names, line, root, tmp_path):
    (tmp_path / "own groups").write_text(f"{line}/slurm/job_7/step_0\n")
    job = tmp_path / root / "slurm" / "job_7"
    unlimited = "max" if names is V2 else 9223372036854771712
    write(job / "step_0", names, unlimited, used=3 << 30)
    assert memory.available_bytes() == FREE
    write(job, names, 4 << 30, used=3 << 30, cache=1 << 29)
    assert memory.available_bytes() == 3 << 29
    write(tmp_path / root, names, 5 << 29)
    assert memory.available_bytes() == 3 << 29
    write(job, names, 4 << 30, used=(4 << 30) + 1)
    assert memory.available_bytes() == 0


def test_a_container_that_sees_its_limit_at_the_root(tmp_path):
    (tmp_path / "own groups").write_text("0::/kubepods/pod1\n")
    write(tmp_path, V2, 2 << 30, used=1 << 30)
    assert memory.available_bytes() == 1 << 30
    (tmp_path / "memory.stat").write_text("anon 5\n")
    assert memory.available_bytes() == 1 << 30
