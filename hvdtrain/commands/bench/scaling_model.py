"""Scaling model: predicts step times on more ranks from measurements on few.

Sources: ring allreduce: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009; checkpoints and failures: J. W. Young, "A first order approximation to the optimum
checkpoint interval", 1974.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

FUSION_BYTES = 128 << 20
"""Horovod fuses buckets that are ready at the same time into allreduces of at most this size."""
SMALL_BYTES = 64 << 10
"""As in launch/open_mpi_allreduce.rules."""
# The tail is at most a tenth of the times, and at most this many. A larger one would mix rare, much longer steps with
# common ones.
_TAIL, _TAIL_STEPS = 0.1, 20
_DRAWS = 4000


@dataclasses.dataclass(frozen=True)
class Link:
    """The network link from one rank to the next."""

    latency_s: float
    """Time of the smallest message, including software overhead."""
    bits_per_second: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts and links of a job."""

    hosts: int
    ranks_per_host: int
    between_hosts: Link
    """Shared by all ranks of a host."""
    within_host: Link
    small_bytes: int = SMALL_BYTES
    """Smaller messages use recursive doubling; 0: all use the ring."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Measured steps of a rank without communication."""

    seconds: np.ndarray
    """Times of single steps, shape ``[steps]``."""
    messages: Sequence[tuple[int, float]]
    """Size of each gradient bucket in bytes, and the fraction of the step after which it is ready."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.messages)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predicted times of a step, in seconds."""

    step_s: float
    compute_s: float
    """Mean over ranks."""
    waiting_s: float
    """Mean wait for the slowest rank."""
    communication_s: float
    """Exposed communication: the part that does not overlap with computation."""

    @property
    def efficiency(self) -> float:
        return self.compute_s / self.step_s


def ring_s(size: int, ranks: int, link: Link) -> float:
    """Time of an allreduce over one ring whose slowest link is ``link``."""
    return 2 * (ranks - 1) * (link.latency_s + 8 * size / ranks / link.bits_per_second)


def doubling_s(size: int, ranks: int, link: Link) -> float:
    """Time of an allreduce by recursive doubling."""
    return math.ceil(math.log2(ranks)) * (link.latency_s + 8 * size / link.bits_per_second)


def around_s(size: int, ranks: int, link: Link, small_bytes: int = SMALL_BYTES) -> float:
    """Time of an allreduce by the algorithm used for this size."""
    if ranks == 1:
        return 0.0
    return doubling_s(size, ranks, link) if size < small_bytes else ring_s(size, ranks, link)


def allreduce_s(size: int, cluster: Cluster, *, hierarchical: bool = False) -> float:
    """Time of an allreduce over all ranks: flat, or hierarchical (within hosts, between hosts, within hosts)."""
    small = cluster.small_bytes
    if cluster.hosts == 1:
        return around_s(size, cluster.ranks, cluster.within_host, small)
    if not hierarchical:
        return around_s(size, cluster.ranks, cluster.between_hosts, small)
    # Each rank of a host reduces its part with the other hosts; together they share the link.
    within_s = around_s(size, cluster.ranks_per_host, cluster.within_host, small)
    return within_s + around_s(size, cluster.hosts, cluster.between_hosts, small)


def slowest_s(seconds: np.ndarray, ranks: int) -> float:
    """Expected time of the slowest rank: the empirical distribution, with an exponential tail."""
    ordered = np.sort(seconds)
    above = max(1, min(int(len(ordered) * _TAIL), _TAIL_STEPS))
    body, tail = ordered[:-above], ordered[-above:]
    start = body[-1] if len(body) else tail[0]
    mean_excess = float(np.mean(tail - start))
    # The expected maximum of N samples is the integral of 1 - F(x)^N.
    expected = float(start)
    if mean_excess > 0:
        grid = np.linspace(0, mean_excess * (math.log(ranks) + 12), 4000)
        missed = 1 - (1 - len(tail) / len(ordered) * np.exp(-grid / mean_excess)) ** ranks
        expected += float(np.sum((missed[1:] + missed[:-1]) / 2) * (grid[1] - grid[0]))
    powers = (np.arange(1, len(body)) / len(ordered)) ** ranks
    return expected - float(np.sum(powers * np.diff(body)))


def communication_end_s(messages: Sequence[tuple[int, float]], compute_s: float, reduce_s: "Reduction") -> float:
    """Time from the start of a step to the end of its last allreduce; buckets ready together are fused."""
    waiting = sorted((share * compute_s, size) for size, share in messages)
    now = 0.0
    while waiting:
        now = max(now, waiting[0][0])
        fused_bytes = 0
        while waiting and waiting[0][0] <= now and (not fused_bytes or fused_bytes + waiting[0][1] <= FUSION_BYTES):
            fused_bytes += waiting.pop(0)[1]
        now += reduce_s(fused_bytes)
    return now


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Maps the size of an allreduce in bytes to its time on a cluster."""

    cluster: Cluster
    hierarchical: bool = False

    def __call__(self, size: int) -> float:
        return allreduce_s(size, self.cluster, hierarchical=self.hierarchical)


def sync_step(step: MeasuredStep, cluster: Cluster, *, hierarchical: bool = False) -> Predicted:
    """Predicts a step of sync mode: each gradient is averaged as soon as the slowest rank has it."""
    compute_s = float(np.mean(step.seconds))
    slowest = slowest_s(step.seconds, cluster.ranks)
    end_s = slowest
    if cluster.ranks > 1:
        end_s = max(slowest, communication_end_s(step.messages, slowest, Reduction(cluster, hierarchical)))
    return Predicted(end_s, compute_s, slowest - compute_s, end_s - slowest)


@dataclasses.dataclass(frozen=True)
class Averaging:
    """When local SGD averages parameters."""

    every: int
    """Steps between two averages of the same parameters."""
    overlap: bool = False
    """In the background."""
    fragments: int = 1
    """Averaged one after the other, one of them every ``every / fragments`` steps."""
    delay: int | None = None
    """Steps after which an average in the background is merged (default: those to the next)."""

    @property
    def round_steps(self) -> int:
        """Steps between two averages."""
        return max(1, self.every // self.fragments)

    def exposed_s(self, num_bytes: int, step_s: float, reduce_s: "Reduction") -> float:
        """The part of the averages of all parameters that is not hidden, per step.

        Args:
            step_s: time of a step without them.
        """
        average_s = reduce_s(math.ceil(num_bytes / self.fragments))
        # Averages are made one after the other: a longer delay hides no more than the steps between two of them.
        hiding_steps = self.round_steps if self.delay is None else min(self.delay, self.round_steps)
        hidden_s = hiding_steps * step_s if self.overlap else 0.0
        return max(0.0, average_s - hidden_s) / self.round_steps


def local_step(step: MeasuredStep, cluster: Cluster, averaging: Averaging, *, hierarchical: bool = False) -> Predicted:
    """Predicts a step of local mode."""
    rng = np.random.default_rng(0)
    rounds = rng.choice(step.seconds, (_DRAWS, averaging.round_steps)).mean(axis=1)
    compute_s, slowest = float(np.mean(step.seconds)), slowest_s(rounds, cluster.ranks)
    exposed_s = averaging.exposed_s(step.bytes, slowest, Reduction(cluster, hierarchical))
    return Predicted(slowest + exposed_s, compute_s, slowest - compute_s, exposed_s)


def local_across_hosts_step(
    step: MeasuredStep, cluster: Cluster, averaging: Averaging, *, hierarchical: bool = False
) -> Predicted:
    """Predicts a step of local mode with ``--average-across host``: between averages, each host trains in sync mode."""
    on_host = sync_step(step, dataclasses.replace(cluster, hosts=1))
    rng = np.random.default_rng(0)
    slowest_of_host = rng.choice(step.seconds, (_DRAWS, averaging.round_steps, cluster.ranks_per_host)).max(axis=2)
    compute_s, slowest = on_host.compute_s, slowest_s(slowest_of_host.mean(axis=1), cluster.hosts)
    exposed_s = on_host.communication_s + averaging.exposed_s(
        step.bytes, slowest + on_host.communication_s, Reduction(cluster, hierarchical)
    )
    return Predicted(slowest + exposed_s, compute_s, slowest - compute_s, exposed_s)


def goodput(
    ranks: int, *, rank_mtbf_s: float, checkpoint_every_s: float, checkpoint_s: float, restart_s: float
) -> float:
    """Fraction of time spent in steps that are not lost to failures, to first order in the failure rate.

    Args:
        rank_mtbf_s: mean time between two failures of one rank.
        checkpoint_s: training time lost per checkpoint.
        restart_s: time from a failure to the next step.
    """
    training = checkpoint_every_s / (checkpoint_every_s + checkpoint_s)
    lost_s = checkpoint_every_s / 2 + restart_s
    return training * max(0.0, 1 - lost_s * ranks / rank_mtbf_s)


def fit_link(measured: Sequence[tuple[int, float]], ranks: int) -> Link:
    """Fits a link to measured allreduce times by least squares of relative errors.

    Args:
        measured: pairs of bytes and seconds.
        ranks: number of participating ranks, each with its own link.
    """
    # Ring: seconds = 2 (N - 1) latency + 2 (N - 1) / N * bits / rate. Small messages: recursive doubling.
    rows, ones = [], []
    for size, seconds in measured:
        ring = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * 8 * size
        doubling = math.ceil(math.log2(ranks)), math.ceil(math.log2(ranks)) * 8 * size
        rows.append([each / seconds for each in (doubling if size < SMALL_BYTES else ring)])
        ones.append(1.0)
    latency_s, seconds_per_bit = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)[0]
    return Link(max(0.0, float(latency_s)), 1 / max(1e-15, float(seconds_per_bit)))
