"""Predictions of ``bench --predict``: the scaling model applied to measured or configured links."""

import math
from typing import Any

import numpy as np

from hvdtrain.commands.bench import fragment_choice, scaling_model
from hvdtrain.commands.bench.config import BenchConfig, PredictionConfig
from hvdtrain.commands.bench.scaling_model import Averaging, Cluster, Link, MeasuredStep
from hvdtrain.commands.tables import aligned
from hvdtrain.errors import UsageError

# With less of a step in communication, sync mode is the choice: see docs/local-sgd.md.
_MIN_COMMUNICATION = 0.2


def require_links(config: PredictionConfig, ranks: int, hosts: int) -> None:
    """Raises UsageError if predictions need a link that is neither configured nor measurable by these ranks."""
    between = config.link_mbit is not None or hosts > 1
    within = config.within_mbit is not None or (hosts == 1 and ranks > 1)
    for predicted in config.predicted_ranks:
        crosses = predicted > _ranks_per_host(config, ranks, hosts)
        if predicted > 1 and not (between if crosses else within):
            where, flags = ("between", "link") if crosses else ("within", "within")
            raise UsageError(
                f"--predict {predicted} needs the link {where} hosts, which {ranks} rank(s) on {hosts} host(s) cannot "
                f"measure. Set --{flags}-mbit and --{flags}-latency-ms."
            )


def _ranks_per_host(config: PredictionConfig, ranks: int, hosts: int) -> int:
    return config.ranks_per_host or max(1, ranks // hosts)


def predict(
    config: BenchConfig,
    found: dict[str, Any],
    seconds: list[float],
    messages: list[tuple[int, float]],
    *,
    max_fragments: int = 1,
) -> dict[str, Any]:
    """Predicts steps for each number of ranks, in sync and in local mode; with several ranks per host, also in local
    mode with ``--average-across host``.

    Args:
        found: the results of the measurements.
        seconds: times of single steps without communication.
        messages: see :class:`~hvdtrain.commands.bench.scaling_model.MeasuredStep`.
        max_fragments: those that the model can be divided into.
    """
    step = MeasuredStep(np.array(seconds), messages)
    per_host = _ranks_per_host(config.prediction, found["ranks"], found["hosts"])
    link, within = _links(config, found)
    options = config.training.local_sgd
    averaging = Averaging(options.sync_every, options.overlap, options.fragments, options.fragment_delay)
    rows, proposals = [], []
    for ranks in config.prediction.predicted_ranks:
        hosts = math.ceil(ranks / per_host)
        nothing = Link(0.0, math.inf)
        cluster = Cluster(hosts, min(ranks, per_host), link or nothing, within or nothing)
        has_groups = hosts > 1 and per_host > 1 and within is not None
        for hierarchical in (False, True) if has_groups else (False,):
            modes = {
                "sync": scaling_model.sync_step(step, cluster, hierarchical=hierarchical),
                "local": scaling_model.local_step(step, cluster, averaging, hierarchical=hierarchical),
            }
            if has_groups:
                modes["local across hosts"] = scaling_model.local_across_hosts_step(
                    step, cluster, averaging, hierarchical=hierarchical
                )
            for mode, made in modes.items():
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
                        "goodput": None if config.prediction.rank_mtbf_hours is None else _goodput(config, ranks),
                    }
                )
        if (proposal := _proposal(step, cluster, max_fragments)) is not None:
            proposals.append(proposal)
    return {
        "what": "a prediction, not a measurement",
        "links": {name: None if each is None else vars(each) for name, each in (("between", link), ("within", within))},
        "messages": messages,
        "rows": rows,
        "proposals": proposals,
    }


def _proposal(step: MeasuredStep, cluster: Cluster, max_fragments: int) -> dict[str, Any] | None:
    """Options of local SGD that hide its averages; None if sync mode needs no help, or none do."""
    sync = scaling_model.sync_step(step, cluster)
    if sync.communication_s < _MIN_COMMUNICATION * sync.step_s:
        return None
    chosen = fragment_choice.choose(step, cluster, max_fragments)
    if chosen is None:
        return None
    return {
        "ranks": cluster.ranks,
        "sync_every": chosen.every,
        "fragments": chosen.fragments,
        "fragment_delay": chosen.delay,
        "average_steps": chosen.average_steps,
        "step_ms": 1000 * chosen.predicted.step_s,
        "sync_step_ms": 1000 * sync.step_s,
    }


def _links(config: BenchConfig, found: dict[str, Any]) -> tuple[Link | None, Link | None]:
    """The links between and within hosts; None: neither measured nor configured."""
    measured = None
    if found["ranks"] > 1:
        taken = [(row["bytes"], row["seconds"]) for row in found["network"]["allreduce"]]
        measured = scaling_model.fit_link(taken, found["ranks"])
    link = measured if found["hosts"] > 1 else None
    within = measured if found["hosts"] == 1 else None
    if config.prediction.link_mbit is not None and config.prediction.link_latency_ms is not None:
        link = Link(config.prediction.link_latency_ms / 1000, 1e6 * config.prediction.link_mbit)
    if config.prediction.within_mbit is not None and config.prediction.within_latency_ms is not None:
        within = Link(config.prediction.within_latency_ms / 1000, 1e6 * config.prediction.within_mbit)
    return link, within


def _goodput(config: BenchConfig, ranks: int) -> float:
    assert config.prediction.rank_mtbf_hours is not None
    return scaling_model.goodput(
        ranks,
        rank_mtbf_s=3600 * config.prediction.rank_mtbf_hours,
        checkpoint_every_s=60 * config.prediction.checkpoint_minutes,
        checkpoint_s=config.prediction.checkpoint_seconds,
        restart_s=config.prediction.restart_seconds,
    )


def table(predicted: dict[str, Any]) -> str:
    """Formats predictions for the console."""
    columns = ("ranks", "hosts", "mode", "allreduce", "ms/step", "efficiency", "waiting", "communication", "goodput")
    cells = [columns]
    for row in predicted["rows"]:
        shares = (row["efficiency"], row["waiting_fraction"], row["communication_fraction"])
        goodput = "" if row["goodput"] is None else f"{row['goodput']:.1%}"
        setting = (str(row["ranks"]), str(row["hosts"]), row["mode"], row["allreduce"])
        cells.append((*setting, f"{row['step_ms']:.3f}", *(f"{share:.1%}" for share in shares), goodput))
    proposals = map(_proposal_line, predicted["proposals"])
    return "\n".join(["predicted, not measured:", *aligned(cells, num_left=0), *proposals])


def _proposal_line(proposal: dict[str, Any]) -> str:
    return (
        f"{proposal['ranks']} ranks: --mode local --sync-every {proposal['sync_every']} "
        f"--fragments {proposal['fragments']} --overlap --fragment-delay {proposal['fragment_delay']} hides averages; "
        f"each takes {proposal['average_steps']:.2f} steps: {proposal['step_ms']:.1f} ms a step instead of "
        f"{proposal['sync_step_ms']:.1f}"
    )
