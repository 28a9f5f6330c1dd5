"""Warnings about the GPUs of a job's hosts, for fake ranks: tests run without a GPU."""

import dataclasses
from types import SimpleNamespace

import pytest

from hvdtrain.distributed import gpu_sharing
from hvdtrain.distributed.gpu_sharing import RankGpus, warnings_for


def host(name: str, ranks: int, gpus: int, visible: str | None = None) -> list[RankGpus]:
    """The ranks of a host as they choose their GPUs."""
    return [RankGpus(name, visible, gpus, f"GPU:{i % gpus}" if gpus else "CPU") for i in range(ranks)]


@pytest.mark.parametrize(
    "ranks",
    [
        host("a", 4, 0),
        [*host("a", 4, 4), *host("b", 4, 4)],
        [*host("a", 4, 4), *host("b", 2, 2)],
        # Slurm shows each rank the one that it has bound to it.
        [RankGpus("a", str(i), 1, "GPU:0") for i in range(4)],
        [*host("a", 2, 0, ""), *host("b", 2, 0, "")],
    ],
)
def test_no_warning_if_every_rank_has_a_gpu_or_none_has(ranks):
    assert warnings_for(ranks) == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([*host("a", 4, 4), *host("b", 4, 0)], "4 rank(s) on host b see no GPU, and delay those that do. Leave"),
        ([*host("a", 4, 4), *host("b", 4, 0, "-1")], "host b see no GPU, because CUDA_VISIBLE_DEVICES=-1 hides them"),
        (host("a", 4, 2), "4 ranks share 2 GPU(s) on host a"),
        (host("a", 2, 1, "3"), "2 ranks share 1 GPU(s) on host a"),
        ([*host("a", 4, 4), *host("b", 3, 4)], "1 of 4 GPUs on host b have no rank. Start 4 there."),
    ],
)
def test_probable_mistakes_are_warned_about(ranks, expected):
    (warning,) = warnings_for(ranks)
    assert expected in warning


class TwoRanks:
    """This one, and one on a host without a GPU."""

    def allgather(self, own):
        return [own, dataclasses.replace(own, host="b", num_gpus=0, device="CPU")]


def test_the_gpus_of_all_ranks_are_compared(monkeypatch):
    monkeypatch.setattr(gpu_sharing.tf.config, "list_physical_devices", lambda kind: [f"/physical_device:{kind}:0"])
    here = SimpleNamespace(topology=SimpleNamespace(device="GPU:0"))
    monkeypatch.setattr(gpu_sharing.runtime, "current", lambda: here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (warning,) = gpu_sharing.gpu_warnings(TwoRanks())
    assert "host b see no GPU, because CUDA_VISIBLE_DEVICES=0 hides them" in warning
