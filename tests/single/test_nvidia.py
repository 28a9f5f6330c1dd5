"""NVIDIA's GPUs as they are found on made-up machines, and what doctor reports about them."""

import pytest

from hvdtrain.commands.doctor.checks import find_gpus
from hvdtrain.system import cuda_libraries
from hvdtrain.system.cuda_libraries import LIBRARIES
from hvdtrain.system.nvidia import Hardware, hardware


def pci_device(root, address: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_gpus_are_found_by_the_driver_or_without_one(tmp_path):
    assert hardware(tmp_path) == Hardware((), has_driver=False)
    pci_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    pci_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # its sound
    pci_device(tmp_path, "0000:02:00.0", "0x1002", "0x030000")  # another vendor's
    assert hardware(tmp_path) == Hardware(("0000:01:00.0",), has_driver=False)
    folder = tmp_path / "proc/driver/nvidia/gpus"
    for address, information in (
        ("0000:01:00.0", "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 12\n"),
        ("0000:41:00.0", ""),
    ):
        (folder / address).mkdir(parents=True)
        (folder / address / "information").write_text(information)
    assert hardware(tmp_path) == Hardware(("NVIDIA H100 80GB HBM3", "0000:41:00.0"), has_driver=True)


@pytest.mark.parametrize(
    ("num_gpus", "found", "has_nccl", "visible", "missing", "rows"),
    [
        (0, Hardware((), False), False, None, [], [("GPUs", "0", None)]),
        (0, Hardware((), False), True, None, LIBRARIES, [("GPUs", "0", None)]),
        (2, Hardware(("A", "A"), True), True, None, [], [("GPUs", "2", None), ("gradients", "by NCCL", None)]),
        (1, Hardware(("A",), True), False, None, [], [("GPUs", "1", None), ("gradients", "=NCCL launch", None)]),
        (
            0,
            Hardware(("A",), True),
            True,
            None,
            ["libcudnn.so.9"],
            [("GPUs", "none of 1: A", "libcudnn.so.9 (absent).")],
        ),
        (0, Hardware(("A",), True), True, "-1", [], [("GPUs", "none of 1: A", "unset CUDA_VISIBLE_DEVICES, which")]),
        (0, Hardware(("A",), True), True, "0", [], [("GPUs", "none of 1: A", "see why")]),
        (0, Hardware(("A",), False), True, None, [], [("GPUs", "none of 1: A", "install NVIDIA's driver")]),
    ],
)
def test_doctor_names_what_is_missing(num_gpus, found, has_nccl, visible, missing, rows, monkeypatch):
    monkeypatch.setattr(cuda_libraries, "errors_of_opening", lambda opener: dict.fromkeys(missing, "absent"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    findings = find_gpus(num_gpus, found, has_nccl=has_nccl)
    assert [finding.topic for finding in findings] == [topic for topic, _, _ in rows]
    for finding, (_, state, remedy) in zip(findings, rows, strict=True):
        assert state in finding.state
        assert (finding.remedy is None) == (remedy is None)
        assert remedy is None or remedy in finding.remedy
