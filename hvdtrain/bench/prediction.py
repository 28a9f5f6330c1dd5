"""What a step takes on more ranks than there are, from what was measured on those that are there: a prediction.

Sources: the cost of a ring allreduce is that of P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009; of checkpoints and failures, J. W. Young, "A first order approximation to the optimum
checkpoint interval", 1974.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

FUSION_BYTES = 128 << 20
"""Horovod reduces messages that are ready together in one of at most so many bytes."""
SMALL_BYTES = 64 << 10
"""As in launch/open_mpi_allreduce.rules."""
_TAIL = 0.1
_DRAWS = 4000


@dataclasses.dataclass(frozen=True)
class Link:
    """What carries a message from one rank to the next."""

    latency_s: float
    """Of the smallest message, with all that software adds."""
    bits_per_second: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where ranks run."""

    hosts: int
    ranks_per_host: int
    between_hosts: Link
    """Shared by the ranks of a host."""
    within_host: Link
    small_bytes: int = SMALL_BYTES
    """Smaller messages travel by recursive doubling; 0: all go around a ring."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A rank's steps without communication."""

    seconds: np.ndarray
    """Of single steps, as they differ; shape ``[steps]``."""
    messages: Sequence[tuple[int, float]]
    """Bytes of each message of gradients, and after what share of the step it is ready."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.messages)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Of a step, in seconds."""

    step_s: float
    compute_s: float
    """On average of all ranks."""
    waiting_s: float
    """For the slowest rank."""
    communication_s: float
    """What of it is not hidden behind computing."""

    @property
    def efficiency(self) -> float:
        return self.compute_s / self.step_s


def ring_s(size: int, ranks: int, link: Link) -> float:
    """An allreduce of so many bytes around one ring, whose slowest link is the one given."""
    return 2 * (ranks - 1) * (link.latency_s + 8 * size / ranks / link.bits_per_second)


def doubling_s(size: int, ranks: int, link: Link) -> float:
    """The same by recursive doubling."""
    return math.ceil(math.log2(ranks)) * (link.latency_s + 8 * size / link.bits_per_second)


def around_s(size: int, ranks: int, link: Link, small_bytes: int = SMALL_BYTES) -> float:
    """The same in the way that is taken for a message of this size."""
    if ranks == 1:
        return 0.0
    return doubling_s(size, ranks, link) if size < small_bytes else ring_s(size, ranks, link)


def allreduce_s(size: int, cluster: Cluster, *, hierarchical: bool = False) -> float:
    """An allreduce over all ranks: around one ring, or within hosts, then between them, then within them again."""
    small = cluster.small_bytes
    if cluster.hosts == 1:
        return around_s(size, cluster.ranks, cluster.within_host, small)
    if not hierarchical:
        return around_s(size, cluster.ranks, cluster.between_hosts, small)
    # Each rank of a host reduces its part with those of other hosts; together they share the link.
    within_s = around_s(size, cluster.ranks_per_host, cluster.within_host, small)
    return within_s + around_s(size, cluster.hosts, cluster.between_hosts, small)


def slowest_s(seconds: np.ndarray, ranks: int) -> float:
    """What the slowest of so many ranks takes on average: the samples' distribution, with an exponential tail."""
    ordered = np.sort(seconds)
    above = max(1, int(len(ordered) * _TAIL))
    body, tail = ordered[:-above], ordered[-above:]
    start = body[-1] if len(body) else tail[0]
    mean_excess = float(np.mean(tail - start))
    # The expected largest of N is the integral of 1 - F(x)^N.
    expected = float(start)
    if mean_excess > 0:
        grid = np.linspace(0, mean_excess * (math.log(ranks) + 12), 4000)
        missed = 1 - (1 - len(tail) / len(ordered) * np.exp(-grid / mean_excess)) ** ranks
        expected += float(np.sum((missed[1:] + missed[:-1]) / 2) * (grid[1] - grid[0]))
    powers = (np.arange(1, len(body)) / len(ordered)) ** ranks
    return expected - float(np.sum(powers * np.diff(body)))


def communication_end_s(messages: Sequence[tuple[int, float]], compute_s: float, reduce_s: "Reduction") -> float:
    """When the last message is reduced, from the beginning of a step: what is ready together travels together."""
    waiting = sorted((share * compute_s, size) for size, share in messages)
    now = 0.0
    while waiting:
        now = max(now, waiting[0][0])
        together = 0
        while waiting and waiting[0][0] <= now and (not together or together + waiting[0][1] <= FUSION_BYTES):
            together += waiting.pop(0)[1]
        now += reduce_s(together)
    return now


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The time of an allreduce on a cluster by its size in bytes."""

    cluster: Cluster
    hierarchical: bool = False

    def __call__(self, size: int) -> float:
        return allreduce_s(size, self.cluster, hierarchical=self.hierarchical)


def sync_step(step: MeasuredStep, cluster: Cluster, *, hierarchical: bool = False) -> Predicted:
    """Gradients averaged at every step, each as soon as the slowest rank has it."""
    compute_s = float(np.mean(step.seconds))
    slowest = slowest_s(step.seconds, cluster.ranks)
    end_s = slowest
    if cluster.ranks > 1:
        end_s = max(slowest, communication_end_s(step.messages, slowest, Reduction(cluster, hierarchical)))
    return Predicted(end_s, compute_s, slowest - compute_s, end_s - slowest)


def local_step(
    step: MeasuredStep, cluster: Cluster, every: int, *, overlap: bool = False, hierarchical: bool = False
) -> Predicted:
    """Parameters averaged every so many steps; with ``overlap`` while ranks go on."""
    rng = np.random.default_rng(0)
    rounds = rng.choice(step.seconds, (_DRAWS, every)).mean(axis=1)
    compute_s, slowest = float(np.mean(step.seconds)), slowest_s(rounds, cluster.ranks)
    reduce_s = allreduce_s(step.bytes, cluster, hierarchical=hierarchical)
    shown_s = max(0.0, reduce_s - every * slowest) if overlap else reduce_s
    return Predicted(slowest + shown_s / every, compute_s, slowest - compute_s, shown_s / every)


def goodput(
    ranks: int, *, rank_mtbf_s: float, checkpoint_every_s: float, checkpoint_s: float, restart_s: float
) -> float:
    """The share of time that goes into steps which are kept, to first order in the rate of failures.

    Args:
        rank_mtbf_s: mean time between two failures of one rank.
        checkpoint_s: what a checkpoint keeps ranks from training.
        restart_s: from a failure to the next step.
    """
    training = checkpoint_every_s / (checkpoint_every_s + checkpoint_s)
    lost_s = checkpoint_every_s / 2 + restart_s
    return training * max(0.0, 1 - lost_s * ranks / rank_mtbf_s)


def fit_link(measured: Sequence[tuple[int, float]], ranks: int) -> Link:
    """The link that explains how long allreduces took, with the smallest relative errors.

    Args:
        measured: bytes and seconds.
        ranks: that took part, each on a link of its own.
    """
    # Of a ring: seconds = 2 (N - 1) latency + 2 (N - 1) / N * bits / rate; of the smallest, by doubling.
    rows, ones = [], []
    for size, seconds in measured:
        ring = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * 8 * size
        doubling = math.ceil(math.log2(ranks)), math.ceil(math.log2(ranks)) * 8 * size
        rows.append([each / seconds for each in (doubling if size < SMALL_BYTES else ring)])
        ones.append(1.0)
    latency_s, seconds_per_bit = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)[0]
    return Link(max(0.0, float(latency_s)), 1 / max(1e-15, float(seconds_per_bit)))
