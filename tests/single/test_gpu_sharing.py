"""What is refused and warned about of the GPUs of a job's hosts, for fake ranks: tests run without a GPU."""

import dataclasses

import pytest

from hvdtrain.distributed import gpu_sharing
from hvdtrain.distributed.config import GpuConfig
from hvdtrain.distributed.gpu_sharing import RankGpus, gpu_warnings, refusal, require_own_gpus, warnings_for
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import JobError


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
    if any(rank.num_gpus for rank in ranks):
        assert refusal(ranks, GpuConfig(), has_nccl=True) is None


@pytest.mark.parametrize(
    ("ranks", "expected", "allowed"),
    [
        (host("a", 4, 2), "Received: 4 ranks share 2 GPU(s) on host a. Start 2 there. Or set share", "share_gpus"),
        (host("a", 2, 1, "3"), "Received: 2 ranks share 1 GPU(s) on host a. Start 1 there.", "share_gpus"),
        ([*host("a", 4, 4), *host("b", 4, 0)], "Received: 4 rank(s) on host b see no GPU, and", "allow_cpu_ranks"),
    ],
)
def test_ranks_without_a_gpu_of_their_own_are_refused_unless_allowed(ranks, expected, allowed):
    assert expected in refusal(ranks, GpuConfig(), has_nccl=False)
    assert refusal(ranks, GpuConfig(**{allowed: True}), has_nccl=False) is None
    message = refusal(ranks, GpuConfig(**{allowed: True}), has_nccl=True)
    assert expected.partition(" Or set")[0] in message
    assert f"{allowed}=True, with a Horovod without NCCL: HOROVOD_GPU_OPERATIONS=none" in message


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([*host("a", 4, 4), *host("b", 4, 0)], "4 rank(s) on host b see no GPU, and delay those that do. Leave"),
        ([*host("a", 4, 4), *host("b", 4, 0, "-1")], "host b see no GPU, because CUDA_VISIBLE_DEVICES=-1 hides them"),
        ([*host("a", 4, 4), *host("b", 3, 4)], "1 of 4 GPUs on host b have no rank. Start 4 there."),
    ],
)
def test_probable_mistakes_are_warned_about(ranks, expected):
    (warning,) = warnings_for(ranks)
    assert expected in warning


class TwoRanks(SingleProcessCollectives):
    """This one, and one on a host without a GPU."""

    size = 2

    def sum(self, arrays):
        return arrays

    def allgather(self, own):
        return [own, dataclasses.replace(own, host="b", num_gpus=0, device="CPU")]


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_the_gpus_of_all_ranks_are_compared(num_gpus, monkeypatch):
    monkeypatch.setattr(gpu_sharing.tf.config, "list_physical_devices", lambda kind: ["a GPU"] * num_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    warnings = gpu_warnings(TwoRanks(), "GPU:0")
    if not num_gpus:
        require_own_gpus(TwoRanks(), "CPU", GpuConfig())
        assert warnings == []
        return
    expected = "host b see no GPU, because CUDA_VISIBLE_DEVICES=0 hides them"
    assert expected in warnings[0]
    with pytest.raises(JobError, match=expected):
        require_own_gpus(TwoRanks(), "GPU:0", GpuConfig())
    require_own_gpus(TwoRanks(), "GPU:0", GpuConfig(allow_cpu_ranks=True))
