"""From what was measured, and from what was given, to predictions."""

import math
from typing import Any

import numpy as np

from hvdtrain.bench import prediction
from hvdtrain.bench.prediction import Cluster, Link, MeasuredStep
from hvdtrain.config import BenchConfig
from hvdtrain.errors import UsageError


def require_links(config: BenchConfig, ranks: int, hosts: int) -> None:
    """Raises UsageError where a link that predictions need is not given, and a job of these ranks cannot measure it."""
    between = config.link_mbit is not None or hosts > 1
    within = config.within_mbit is not None or (hosts == 1 and ranks > 1)
    for asked in config.predicted_ranks:
        crosses = asked > _ranks_per_host(config, ranks, hosts)
        if asked > 1 and not (between if crosses else within):
            where, flags = ("between", "link") if crosses else ("within", "within")
            raise UsageError(
                f"--predict {asked} needs to know the link {where} hosts, which {ranks} rank(s) on {hosts} host(s) "
                f"cannot measure. Give --{flags}-mbit and --{flags}-latency-ms."
            )


def _ranks_per_host(config: BenchConfig, ranks: int, hosts: int) -> int:
    return config.ranks_per_host or max(1, ranks // hosts)


def predict(
    config: BenchConfig, found: dict[str, Any], seconds: list[float], messages: list[tuple[int, float]]
) -> dict[str, Any]:
    """Steps on each number of ranks, in sync and in local mode.

    Args:
        found: what was measured.
        seconds: of single steps without communication.
        messages: see :class:`~hvdtrain.bench.prediction.MeasuredStep`.

    """
    step = MeasuredStep(np.array(seconds), messages)
    per_host = _ranks_per_host(config, found["ranks"], found["hosts"])
    link, within = _links(config, found)
    rows = []
    for ranks in config.predicted_ranks:
        hosts = math.ceil(ranks / per_host)
        nothing = Link(0.0, math.inf)
        cluster = Cluster(hosts, min(ranks, per_host), link or nothing, within or nothing)
        for hierarchical in (False, True) if hosts > 1 and per_host > 1 and within is not None else (False,):
            local = prediction.local_step(
                step, cluster, config.average_every, overlap=config.overlap, hierarchical=hierarchical
            )
            sync = prediction.sync_step(step, cluster, hierarchical=hierarchical)
            for mode, made in (("sync", sync), ("local", local)):
                rows.append(
                    {
                        "ranks": ranks,
                        "hosts": hosts,
                        "mode": mode,
                        "allreduce": "hierarchical" if hierarchical else "flat",
                        "step_ms": 1000 * made.step_s,
                        "efficiency": made.efficiency,
                        "compute_fraction": made.compute_s / made.step_s,
                        "waiting_fraction": made.waiting_s / made.step_s,
                        "communication_fraction": made.communication_s / made.step_s,
                        "goodput": None if config.rank_mtbf_hours is None else _goodput(config, ranks),
                    }
                )
    return {
        "what": "a prediction, nothing that was run",
        "links": {name: None if each is None else vars(each) for name, each in (("between", link), ("within", within))},
        "messages": messages,
        "rows": rows,
    }


def _links(config: BenchConfig, found: dict[str, Any]) -> tuple[Link | None, Link | None]:
    """Between hosts and within one; None: neither measured nor given."""
    measured = None
    if found["ranks"] > 1:
        taken = [(row["bytes"], row["seconds"]) for row in found["network"]["allreduce"]]
        measured = prediction.fit_link(taken, found["ranks"])
    link = measured if found["hosts"] > 1 else None
    within = measured if found["hosts"] == 1 else None
    if config.link_mbit is not None and config.link_latency_ms is not None:
        link = Link(config.link_latency_ms / 1000, 1e6 * config.link_mbit)
    if config.within_mbit is not None and config.within_latency_ms is not None:
        within = Link(config.within_latency_ms / 1000, 1e6 * config.within_mbit)
    return link, within


def _goodput(config: BenchConfig, ranks: int) -> float:
    assert config.rank_mtbf_hours is not None
    return prediction.goodput(
        ranks,
        rank_mtbf_s=3600 * config.rank_mtbf_hours,
        checkpoint_every_s=60 * config.checkpoint_minutes,
        checkpoint_s=config.checkpoint_seconds,
        restart_s=config.restart_seconds,
    )


def table(predicted: dict[str, Any]) -> str:
    """Lines for the console."""
    columns = ("ms a step", "efficiency", "waiting", "communication", "goodput")
    lines = [
        "predicted, not run:",
        f"{'ranks':>6} {'hosts':>6} {'mode':>6} {'allreduce':>13}" + "".join(f"{name:>14}" for name in columns),
    ]
    for row in predicted["rows"]:
        shares = (row["efficiency"], row["waiting_fraction"], row["communication_fraction"])
        goodput = "" if row["goodput"] is None else f"{row['goodput']:.1%}"
        lines.append(
            f"{row['ranks']:>6} {row['hosts']:>6} {row['mode']:>6} {row['allreduce']:>13}{row['step_ms']:>14.3f}"
            + "".join(f"{share:>14.1%}" for share in shares)
            + f"{goodput:>14}"
        )
    return "\n".join(lines)
